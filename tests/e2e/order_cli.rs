//! `stitchd order`: training graphs in the order that needs the least memory, checked by somebody who knows only their JSON.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};

use crate::support::{run, run_json};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn graphs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/graphs")
}

fn read(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap();
    let plain = if path.extension().unwrap() == "zst" { zstd::decode_all(&bytes[..]).unwrap() } else { bytes };
    serde_json::from_slice(&plain).unwrap()
}

fn names(value: &Value) -> Vec<&str> {
    value.as_array().map(|all| all.iter().map(|name| name.as_str().unwrap()).collect()).unwrap_or_default()
}

fn pairs(value: &Value) -> Vec<[&str; 2]> {
    value
        .as_array()
        .map(|all| all.iter().map(|pair| [0, 1].map(|at| pair[at].as_str().unwrap())).collect())
        .unwrap_or_default()
}

/// When memory is live, by the first of its tensors: from which operator to before which, and how much.
fn lives<'a>(graph: &'a Value, order: &[&str]) -> BTreeMap<&'a str, (usize, usize, u64)> {
    let place: HashMap<&str, usize> = order.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let mut first: HashMap<&str, &str> = HashMap::new();
    let sizes = graph["tensors"].as_object().unwrap();
    // Aliases as groups, by moving all of one into the other.
    let mut groups: HashMap<&str, Vec<&str>> = sizes.keys().map(|name| (name.as_str(), vec![name.as_str()])).collect();
    for name in sizes.keys() {
        first.insert(name, name);
    }
    for [one, other] in pairs(&graph["aliases"]) {
        let (to, from) = (first[one], first[other]);
        if to != from {
            let moved = groups.remove(from).unwrap();
            for name in &moved {
                first.insert(name, to);
            }
            groups.get_mut(to).unwrap().extend(moved);
        }
    }
    let nodes = graph["nodes"].as_array().unwrap();
    let (mut makers, mut readers): (HashMap<&str, usize>, HashMap<&str, Vec<usize>>) = Default::default();
    for node in nodes {
        let at = place[node["name"].as_str().unwrap()];
        for name in names(&node["outputs"]) {
            makers.insert(name, at);
        }
        names(&node["inputs"]).into_iter().for_each(|name| readers.entry(name).or_default().push(at));
    }
    let kept: BTreeSet<&str> = names(&graph["keep"]).into_iter().collect();
    let live = |(name, group): (&&'a str, &Vec<&'a str>)| {
        let bytes = group.iter().map(|name| sizes[*name].as_u64().unwrap()).max().unwrap();
        let uses = || {
            group.iter().flat_map(|name| makers.get(name).into_iter().chain(readers.get(name).into_iter().flatten()))
        };
        let is_given = group.iter().any(|name| !makers.contains_key(name));
        let is_kept = group.iter().any(|name| !readers.contains_key(name) || kept.contains(name));
        let from = if is_given { 0 } else { *uses().min().unwrap() };
        let to = if is_kept { order.len() } else { uses().max().unwrap() + 1 };
        (*name, (from, to, bytes))
    };
    groups.iter().map(live).collect()
}

/// The most that is live while any operator runs; fails where it is no order of the graph.
fn peak(graph: &Value, order: &[&str]) -> u64 {
    let place: HashMap<&str, usize> = order.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let nodes = graph["nodes"].as_array().unwrap();
    assert_eq!((place.len(), order.len()), (nodes.len(), nodes.len()), "each operator once");
    let mut maker = HashMap::new();
    for node in nodes {
        for name in names(&node["outputs"]) {
            maker.insert(name, node["name"].as_str().unwrap());
        }
    }
    for node in nodes {
        let at = place[node["name"].as_str().unwrap()];
        for input in names(&node["inputs"]) {
            assert!(maker.get(input).is_none_or(|maker| place[maker] < at), "{input} is read before it is made");
        }
    }
    for [before, after] in pairs(&graph["control"]) {
        assert!(place[before] < place[after], "{before} is to run before {after}");
    }
    let mut live = vec![0_u64; order.len()];
    for (from, to, bytes) in lives(graph, order).into_values() {
        live[from..to].iter_mut().for_each(|live| *live += bytes);
    }
    for node in nodes {
        live[place[node["name"].as_str().unwrap()]] += node["workspace_bytes"].as_u64().unwrap_or(0);
    }
    live.into_iter().max().unwrap()
}

/// Checks that no two places that are live together share a byte, and that all are inside.
fn check_places(answer: &Value) {
    let places = answer["placement"]["places"].as_array().unwrap();
    let number = |place: &Value, what: &str| place[what].as_u64().unwrap();
    let mut rows: Vec<(u64, u64, u64, u64)> = places
        .iter()
        .map(|place| {
            let offset = number(place, "offset");
            (number(place, "from"), number(place, "to"), offset, offset + number(place, "bytes"))
        })
        .collect();
    rows.sort_unstable();
    let mut live: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (from, to, start, end) in rows {
        assert!(end <= answer["placement"]["bytes"].as_u64().unwrap());
        live.retain(|_, (until, _)| *until > from);
        let below = live.range(..end).next_back();
        assert!(below.is_none_or(|(_, (_, above))| *above <= start), "{start} to {end} at {from} is another's");
        live.insert(start, (to, end));
    }
}

#[test]
fn every_shipped_graph_is_ordered_at_the_least_that_is_possible_and_placed_without_gaps() {
    let mut reductions: HashMap<bool, Vec<(f64, f64)>> = HashMap::new();
    let mut files: Vec<PathBuf> = std::fs::read_dir(graphs()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "zst"));
    files.sort_unstable();
    assert_eq!(files.len(), 24);
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let answer = run_json(&["order", text(&path), "--json"]);
        let graph = read(&path);
        let order = names(&answer["order"]);
        let given: Vec<&str> =
            graph["nodes"].as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap()).collect();
        let found = peak(&graph, &order);
        assert_eq!(answer["peak_bytes"], found, "{name}");
        assert_eq!(answer["initial_peak_bytes"], peak(&graph, &given), "{name}");
        assert_eq!((&answer["lower_bound_bytes"], &answer["proven_optimal"]), (&json!(found), &json!(true)), "{name}");
        check_places(&answer);
        let placed = answer["placement"]["bytes"].as_u64().unwrap();
        assert_eq!(placed, found, "{name}: nothing lies between the pieces");
        let caching = answer["caching_allocator_bytes"].as_u64().unwrap();
        let less = |before: u64| 1.0 - placed as f64 / before as f64;
        let row = (less(answer["initial_peak_bytes"].as_u64().unwrap()), less(caching));
        reductions.entry(name.contains("-32.")).or_default().push(row);
    }
    for (is_large, rows) in reductions {
        let of = |which: fn(&(f64, f64)) -> f64| 100.0 * rows.iter().map(which).sum::<f64>() / rows.len() as f64;
        let (order, all) = (of(|row| row.0), of(|row| row.1));
        let batch = if is_large { 32 } else { 1 };
        println!("batch {batch}: {order:.1} % less by order, {all:.1} % less than the caching allocator reserves");
        assert!(order > 0.0 && all > order);
    }
}

#[test]
fn what_an_order_allocates_is_served_from_its_plan_without_a_deviation() {
    let dir = tempfile::tempdir().unwrap();
    // Weights of some are all that is asked for before the first pass: nothing of that varies.
    for name in ["resnet18-1", "vit-b16-1", "vit-b16-32", "xlm-r-base-32", "transformer-1", "transformer-32"] {
        let graph = graphs().join(format!("{name}.json.zst"));
        let [trace, plan] = ["ordered.csv.zst", "job.plan"].map(|name| dir.path().join(name));
        let ordered = run_json(&["order", text(&graph), "--trace", text(&trace), "--iterations", "4", "--json"]);
        let planned = run_json(&["plan", text(&trace), "-o", text(&plan), "--json"]);
        // Sizes as pools serve them are multiples of 512.
        let (pool, least) = (planned["peak_bytes"].as_u64().unwrap(), ordered["peak_bytes"].as_u64().unwrap());
        assert!(least <= pool && pool < least + (1 << 20), "{name}: {pool} and {least}");
        let replayed = run_json(&["replay", text(&trace), "--pool", "stitchd", "--plan", text(&plan), "--json"]);
        let pool = &replayed["pools"][0];
        let served = ["pool", "stitching", "reuse"].map(|who| pool["served_bytes"][who].as_u64().unwrap());
        assert_eq!((&pool["deviations"], served), (&json!(0), [0; 3]), "{name}: {pool}");
    }
}

#[test]
fn the_answer_is_written_with_the_graph_and_can_be_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let graph = graphs().join("alexnet-1.json.zst");
    let [out, html] = ["ordered.json", "order.html"].map(|name| dir.path().join(name));
    let ran = run(&["order", text(&graph), "-o", text(&out), "--html", text(&html)]);
    let said = String::from_utf8(ran.stdout).unwrap();
    assert!(ran.status.success() && said.contains("no order needs less") && said.contains("before ▄"), "{said}");
    let written = read(&out);
    assert_eq!(written["nodes"], read(&graph)["nodes"]);
    assert_eq!(peak(&written, &names(&written["order"])), written["peak_bytes"].as_u64().unwrap());
    let again = run_json(&["order", text(&out), "--json"]);
    assert_eq!(again["order"], written["order"], "the same, and again");
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(page.matches("<rect").count() > 50 && page.matches("<path class=").count() == 2 && !page.contains("NaN"));
    let refused = run(&["order", text(&out), "-o", text(&out)]);
    assert_eq!(refused.status.code(), Some(2), "it is the file that is read");
    let aligned = run_json(&["order", text(&graph), "--align", "512", "--json"]);
    let places = aligned["placement"]["places"].as_array().unwrap();
    assert!(places.iter().all(|place| place["offset"].as_u64().unwrap() % 512 == 0));
}

#[test]
fn less_work_gives_the_same_answer_each_time_and_never_a_worse_one_than_is_there() {
    let graph = graphs().join("googlenet-1.json.zst");
    for work in ["0", "1", "10000", "300000"] {
        let [one, two] = [(); 2].map(|()| run_json(&["order", text(&graph), "--work", work, "--json"]));
        assert_eq!(one["order"], two["order"], "{work}");
        assert!(one["peak_bytes"].as_u64() <= one["initial_peak_bytes"].as_u64());
        assert!(one["work_units"].as_u64().unwrap() <= work.parse::<u64>().unwrap() + 100_000, "{}", one["work_units"]);
        assert_eq!(one["proven_optimal"], one["peak_bytes"] == one["lower_bound_bytes"]);
    }
    let hurried = run_json(&["order", text(&graph), "--time-limit", "0", "--json"]);
    assert!(hurried["peak_bytes"].as_u64() <= hurried["initial_peak_bytes"].as_u64());
}

#[test]
fn what_is_no_graph_is_refused_with_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("graph.json");
    let refused = |contents: &str| -> String {
        std::fs::write(&file, contents).unwrap();
        let Output { status, stderr, stdout } = run(&["order", text(&file), "--json"]);
        let error = String::from_utf8(stderr).unwrap();
        assert_eq!((status.code(), stdout.len()), (Some(2), 0), "{contents}: {error}");
        error
    };
    let one = r#"{"name":"a","inputs":["x"],"outputs":["y"]}"#;
    let with =
        |tensors: &str, nodes: &str, more: &str| format!(r#"{{"tensors":{{{tensors}}},"nodes":[{nodes}]{more}}}"#);
    for (contents, expected) in [
        ("", "no graph: EOF"),
        ("[]", "no graph: invalid"),
        ("{\"tensors\":{}}", "missing field `nodes`"),
        (&with("", "", ""), "the graph has no nodes"),
        (&with(r#""x":1"#, one, ""), "node 'a': there is no tensor 'y'"),
        (&with(r#""x":1,"x":2,"y":2"#, one, ""), "there are two of the tensor 'x'"),
        (&with(r#""x":1,"y":-2"#, one, ""), "tensor 'y': -2 is not a number of bytes"),
        (&with(r#""x":1,"y":1.5"#, one, ""), "tensor 'y': 1.5"),
        (&with(r#""x":1,"y":2"#, &format!("{one},{one}"), ""), "there are two of the node 'a'"),
        (&with(r#""x":1,"y":2"#, &one.replace("inputs", "input"), ""), "unknown field `input`"),
        (&with(r#""x":1,"y":2"#, one, r#","control":[["a","a"]]"#), "the first for the last: a"),
        (&with(r#""x":1,"y":2"#, one, r#","control":[["a","b"]]"#), "control: there is no node 'b'"),
        (&with(r#""x":1,"y":2"#, one, r#","aliases":[["x","z"]]"#), "aliases: there is no tensor 'z'"),
        (&with(r#""x":1,"y":2"#, one, r#","keep":["z"]"#), "keep: there is no tensor 'z'"),
        (&with(r#""x":18446744073709551615,"y":2"#, one, ""), "larger than any machine"),
        (
            &with(r#""x":1,"y":2"#, &format!(r#"{one},{{"name":"b","inputs":["y"],"outputs":["x"]}}"#), ""),
            "each waits for the one before",
        ),
        (&"[".repeat(100_000), "no graph"),
    ] {
        let error = refused(contents);
        assert!(error.contains(expected), "{} gives {error}", &contents[..contents.len().min(200)]);
    }
    // What may be misspelt is said, and so is what steers terminals, in letters.
    std::fs::write(
        &file,
        with(r#""x":1,"y":2"#, &one.replace('}', r#","kind":"updat"}"#), r#","keeps":["x"],"order":["a"]"#),
    )
    .unwrap();
    let notes = run_json(&["order", text(&file), "--json"])["notes"].to_string();
    assert!(notes.contains("'keeps' means nothing here") && !notes.contains("'order'"), "{notes}");
    assert!(notes.contains("the kinds of 1 node mean nothing here ('updat' of 'a')"), "{notes}");
    let steers = refused(&with(r#""x":1"#, &one.replace("\"y\"", r#""\u001b[2J""#), ""));
    assert!(steers.contains(r"there is no tensor '\u{1b}[2J'"), "{steers:?}");
    assert!(String::from_utf8(run(&["order", "/nowhere.json"]).stderr).unwrap().contains("/nowhere.json"));
    let wrong = run(&["order", text(&file), "--trace", "x.txt"]);
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("ends in none of"));
}
