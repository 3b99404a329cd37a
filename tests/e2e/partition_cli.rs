//! `stitchd partition`: from runs to a profile to a plan, and what it says of files that are none.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::{run, run_json, stderr};

/// A directory of its own with files in it.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = PathBuf::from(self.path(name));
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

/// Runs of six layers on four GPUs, measured on a model whose layers need 100 and 10 for each sample alone, and add half of it; a share of that with data and tensor parallelism.
fn measured() -> Value {
    let mut results =
        run_json(&["partition", "runs", "--layers", "6", "--gpus", "8", "--target-batch", "64", "--json"]);
    for run in results["runs"].as_array_mut().unwrap() {
        let layer = (100 + 10 * run["batch_size"].as_u64().unwrap()) * 1024 / run["degree"].as_u64().unwrap();
        let sizes = run["partition"].as_array().unwrap();
        let peaks: Vec<u64> = sizes.iter().map(|size| layer + (size.as_u64().unwrap() - 1) * layer / 2).collect();
        run["peak_bytes"] = json!(peaks);
    }
    results
}

#[test]
fn runs_are_merged_to_a_profile_and_the_profile_is_planned() {
    let place = Place::new();
    let results = place.write("results.json", &measured().to_string());
    let profile = place.path("profile.json");
    let made = run_json(&["partition", "merge", &results, "-o", &profile, "--json"]);
    assert_eq!((&made["layers"], &made["measurements"]), (&6.into(), &10.into()));
    assert_eq!(made["notes"], json!([]));
    // A run that peaked elsewhere than the others say is named.
    let mut other = measured();
    let peak = &mut other["runs"][2]["peak_bytes"][0];
    *peak = (peak.as_u64().unwrap() * 3 / 2).into();
    let other = place.write("other.json", &other.to_string());
    let made = run_json(&["partition", "merge", &other, "-o", &place.path("other-profile.json"), "--json"]);
    let note = made["notes"][0].as_str().unwrap();
    assert!(note.contains("the runs do not agree: part ") && note.contains("% apart"), "{note}");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(&profile).unwrap()).unwrap();
    let first = &file["measurements"][0];
    assert_eq!((&first["parallelism"], &first["batch_size"]), (&"pipeline".into(), &16.into()));
    assert_eq!((&first["isolated_bytes"][5], &first["added_bytes"][5]), (&(260 * 1024).into(), &(130 * 1024).into()));

    let plan = run_json(&["partition", &profile, "--nodes", "2", "--gpus-per-node", "4", "--json"]);
    let stages = plan["stages"].as_array().unwrap();
    let mut gpus: Vec<u64> =
        stages.iter().flat_map(|stage| stage["gpus"].as_array().unwrap()).map(|gpu| gpu.as_u64().unwrap()).collect();
    gpus.sort_unstable();
    assert_eq!(gpus, (0..8).collect::<Vec<_>>());
    let layers: Vec<u64> = stages
        .iter()
        .flat_map(|stage| stage["layers"].as_array().unwrap())
        .map(|layer| layer.as_u64().unwrap())
        .collect();
    assert_eq!((layers[0], *layers.last().unwrap()), (0, 5));
    assert!(layers[1..layers.len() - 1].chunks(2).all(|pair| pair[0] + 1 == pair[1]), "{layers:?}");
    let peaks = stages.iter().map(|stage| stage["predicted_peak_bytes"].as_u64().unwrap());
    assert_eq!(plan["peak_bytes"].as_u64(), peaks.max());
    // Two stages of four, each with three layers a quarter of each: 740 · 1024 · 2 / 4.
    assert_eq!(plan["peak_bytes"], 740 * 1024 / 2);
    assert_eq!((&plan["proven_optimal"], plan["plans_considered"].as_u64() > Some(100)), (&true.into(), true));
    assert_eq!(plan["guarantees"].as_array().unwrap().len(), 8);
    let gpu = json!({ "gpu": 5, "node": 1, "device": 1, "predicted_peak_bytes": 740 * 1024 / 2, "bytes": 2 << 20 });
    assert_eq!(plan["guarantees"][5], gpu);

    let output = run(&["partition", &profile, "--nodes", "2", "--gpus-per-node", "4"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in [
        "6 layers in 2 stages on 8 GPUs, gpipe",
        "370.0 KiB",
        "none has less",
        "0-2",
        "4-7",
        "####",
        "STITCHD_GUARANTEE",
    ] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
    // Whether it fits is the exit code.
    for (memory, code) in [("370KiB", 0), ("369KiB", 1)] {
        let output = run(&["partition", &profile, "--nodes", "2", "--gpus-per-node", "4", "--memory", memory]);
        assert_eq!(output.status.code(), Some(code), "{memory}");
    }
    // With 1F1B the last stages keep less.
    let on = ["partition", &profile, "--nodes", "1", "--gpus-per-node", "4", "--json"];
    let (gpipe, other) = (run_json(&on), run_json(&[&on[..], &["--schedule", "1f1b", "--microbatches", "8"]].concat()));
    assert!(other["peak_bytes"].as_u64() < gpipe["peak_bytes"].as_u64());
    // Stages of merged layers are named as the model names them.
    let coarse = place.path("coarse.json");
    run_json(&["partition", "merge", &profile, "--merge-to", "3", "-o", &coarse, "--json"]);
    let plan = run_json(&["partition", &coarse, "--nodes", "1", "--gpus-per-node", "2", "--json"]);
    let last = plan["stages"].as_array().unwrap().last().unwrap();
    assert_eq!((&plan["layers"], &last["layers"][1]), (&6.into(), &5.into()));
}

/// Peaks of runs on a model whose layers need once, twice, three times, once … as much alone, and add half of that.
#[test]
fn what_the_listed_runs_are_not_is_said_beside_the_file_too() {
    let args = ["partition", "runs", "--layers", "6", "--gpus", "8", "--degrees", "2,8", "--target-batch", "66"];
    let table = run(&args);
    let file = run(&[&args[..], &["--json"]].concat());
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    let sizes: Value = serde_json::from_slice(&file.stdout).unwrap();
    assert_eq!(sizes["runs"][0]["batch_size"], 33);
    let notes = stderr(&file);
    for said in ["66 has no whole quarter: measured are batches of 33 and 16", "too few GPUs for groups of 8"] {
        assert!(table.contains(said) && notes.contains(said), "{table}{notes}");
    }
    let args = ["partition", "runs", "--layers", "6", "--gpus", "8", "--degrees", "2", "--target-batch", "64"];
    assert_eq!(stderr(&run(&[&args[..], &["--json"]].concat())), "");
}

fn filled(mut results: Value) -> Value {
    for run in results["runs"].as_array_mut().unwrap() {
        let half = (100 + 10 * run["batch_size"].as_u64().unwrap()) * 512 / run["degree"].as_u64().unwrap();
        let mut next = 0;
        let peaks = run["partition"].as_array().unwrap().iter().map(|size| {
            let first = next;
            next += size.as_u64().unwrap();
            let added: u64 = (first..next).map(|layer| 1 + layer % 3).sum();
            half * (1 + first % 3) + half * added
        });
        let peaks: Vec<u64> = peaks.collect();
        run["peak_bytes"] = json!(peaks);
    }
    results
}

fn count(results: &Value) -> usize {
    results["runs"].as_array().unwrap().len()
}

#[test]
fn merging_layers_between_runs_spares_runs_and_gives_the_same_profile() {
    let place = Place::new();
    let json = |name: &str, value: &Value| place.write(name, &value.to_string());
    let model = ["--layers", "12", "--gpus", "8", "--target-batch", "64", "--json"];
    let runs = |more: &[&str]| filled(run_json(&[&["partition", "runs"][..], &model, more].concat()));
    let all = runs(&[]);
    let whole = json("whole.json", &run_json(&["partition", "merge", &json("all.json", &all)]));
    let expected = run_json(&["partition", "merge", &whole, "--merge-to", "6"]);
    // Pipeline parallelism, then merged, then the others.
    let alone = runs(&["--degrees", "1"]);
    let coarse = place.path("coarse.json");
    run_json(&["partition", "merge", &json("alone.json", &alone), "--merge-to", "6", "-o", &coarse, "--json"]);
    let shared = filled(run_json(&["partition", "runs", "--merged", &coarse, "--gpus", "8", "--json"]));
    assert_eq!((&shared["layers"], &shared["target_batch_size"]), (&12.into(), &64.into()));
    assert_eq!(shared["layer_sizes"], expected["layer_sizes"]);
    let shared_file = json("shared.json", &shared);
    // Whichever comes first.
    for files in [[&coarse, &shared_file], [&shared_file, &coarse]] {
        assert_eq!(run_json(&["partition", "merge", files[0], files[1]]), expected);
    }
    assert_eq!([count(&all), count(&alone), count(&shared)], [120, 24, 48]);
    let output = run(&["partition", "runs", "--merged", &coarse, "--gpus", "8"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("48 runs, two iterations each are enough; with all 12 layers it would be 96"), "{text}");
    // Half of those again, where a second batch size says what the first does: here it does.
    let few = filled(run_json(&["partition", "runs", "--merged", &coarse, "--gpus", "8", "--one-batch", "--json"]));
    assert_eq!(count(&few), 24);
    let few = json("few.json", &run_json(&["partition", "merge", &coarse, &json("half.json", &few)]));
    let merged = json("merged.json", &expected);
    let mesh = ["--nodes", "2", "--gpus-per-node", "4", "--json"];
    let [one, other] = [&merged, &few].map(|profile| run_json(&[&["partition", profile.as_str()][..], &mesh].concat()));
    assert_eq!((&one["layers"], &one["stages"]), (&12.into(), &other["stages"]));

    // Files that are not of one model say so.
    let whole_layers = json("whole-layers.json", &run_json(&["partition", "merge", &json("again.json", &alone)]));
    let mut later = shared.clone();
    later["target_batch_size"] = json!(32);
    let later = json("later.json", &later);
    let mut cut = shared.clone();
    cut["runs"][0]["partition"] = json!([1, 11]);
    cut["runs"][0]["peak_bytes"] = json!([1, 1]);
    let cut = json("cut.json", &cut);
    let cases: [(&[&str], &str); 8] = [
        (&["merge", &shared_file], "shared.json: there is no measurement with pipeline parallelism"),
        (&["merge", &whole_layers, &shared_file], "are not of the same layers: layer 0 is 1 of the model's in one"),
        (&["merge", &coarse, &later], "target_batch_size is 64 in one and 32 in another"),
        (&["merge", &coarse, &cut], "cut.json: run 0: a part ends within merged layer 0, which stays whole"),
        (&["runs", "--merged", &coarse, "--gpus", "2"], "6 layers on 2 GPUs in groups of 2"),
        (&["runs", "--merged", &coarse, "--gpus", "8", "--degrees", "1"], "of degrees above 1"),
        (&["runs", "--merged", &coarse, "--gpus", "8", "--layers", "12"], "cannot be used with"),
        (&["runs", "--gpus", "8"], "--layers"),
    ];
    for (args, words) in cases {
        let output = run(&[&["partition"][..], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn recorded_traces_are_peaks_of_parts_or_layers_of_a_model() {
    let place = Place::new();
    let trace = |batch: u64| {
        let head = "tick,event,id,bytes,stream,iteration,phase,module,dynamic\n";
        let row = |id: u64, module: &str, bytes: u64| format!("{id},alloc,{id},{bytes},0,0,forward,{module},0\n");
        [
            head.to_owned(),
            row(0, "embedding", 1000),
            row(1, "h.2.mlp", 100 * batch),
            row(2, "h.10.mlp", 200 * batch),
            row(3, "h.10.attention.0", 7),
            row(4, "head", 30),
        ]
        .concat()
    };
    let (half, quarter) = (place.write("half.csv", &trace(32)), place.write("quarter.csv", &trace(16)));
    let (half, quarter) = (format!("32={half}"), format!("16={quarter}"));
    let profile = run_json(&["partition", "merge", "--trace", &half, "--trace", &quarter, "--target-batch", "64"]);
    assert_eq!(profile["measurements"][0]["isolated_bytes"], json!([1000 + 1600, 3200 + 7 + 30]));
    let file = place.write("profile.json", &profile.to_string());
    let plan = run_json(&["partition", &file, "--nodes", "1", "--gpus-per-node", "2", "--json"]);
    assert_eq!(plan["peak_bytes"], 200 * 64 + 37);
    // A number that comes again elsewhere is another layer's, and it is said what was taken for one.
    let stages = trace(32).replace("h.2.", "m.stage1.0.").replace("h.10.", "m.stage2.0.").replace("head", "m.stage2.1");
    let stages = format!("32={}", place.write("stages.csv", &stages));
    let out = place.path("stages.json");
    let said = run_json(&["partition", "merge", "--trace", &stages, "--target-batch", "32", "-o", &out, "--json"]);
    let note = "3 layers, m.stage1.0 to m.stage2.1; of modules without a number 1000 B stand with the first and 0 B with the last of them";
    assert_eq!(said["notes"], json!([note]));
    let text = std::fs::read_to_string(out).unwrap();
    assert!(text.contains("[4200,6407,30]"), "{text}");
    // As peaks of parts, found beside the results.
    let run_of = |partition: &[u64], traces: &[&str], batch: u64| json!({ "parallelism": "pipeline", "degree": 1, "batch_size": batch, "partition": partition, "traces": traces });
    let runs = [run_of(&[1, 1], &["half.csv", "quarter.csv"], 32), run_of(&[2], &["half.csv"], 32)];
    let results = json!({ "layers": 2, "target_batch_size": 32, "runs": runs });
    let profile = run_json(&["partition", "merge", &place.write("results.json", &results.to_string())]);
    let peak = |batch: u64| 1000 + 300 * batch + 37;
    assert_eq!(profile["measurements"][0]["isolated_bytes"], json!([peak(32), peak(16)]));
}

#[test]
fn what_cannot_be_planned_is_said_in_words_and_is_exit_code_2() {
    let place = Place::new();
    let results = measured();
    let good = place.write("results.json", &results.to_string());
    let profile = place.path("profile.json");
    run_json(&["partition", "merge", &good, "-o", &profile, "--json"]);
    let mut half = results.clone();
    half["runs"].as_array_mut().unwrap().remove(0);
    half["runs"][3].as_object_mut().unwrap().remove("peak_bytes");
    let unfilled = place.write("unfilled.json", &half.to_string());
    let mut again = results.clone();
    let mut same = again["runs"][0].clone();
    same["peak_bytes"][1] = (2 * same["peak_bytes"][1].as_u64().unwrap()).into();
    again["runs"].as_array_mut().unwrap().push(same);
    let again = place.write("again.json", &again.to_string());
    let broken = place.write("broken.json", "{\"layers\": 3");
    let template = run_json(&["partition", "runs", "--layers", "6", "--gpus", "8", "--json"]);
    let template = place.write("template.json", &template.to_string());
    let mesh = |nodes: &'static str, gpus: &'static str| ["--nodes", nodes, "--gpus-per-node", gpus];
    let cases: Vec<(Vec<&str>, &str)> = vec![
        ([&["partition", &broken][..], &mesh("1", "4")].concat(), "broken.json: this is no profile: EOF"),
        (
            [&["partition", &good][..], &mesh("1", "4")].concat(),
            "results.json is a file of results: `stitchd partition merge ",
        ),
        ([&["partition", "missing.json"][..], &mesh("1", "4")].concat(), "missing.json: No such file"),
        ([&["partition", &profile][..], &mesh("0", "4")].concat(), "0 nodes of 4 GPUs are no mesh"),
        ([&["partition", &profile][..], &mesh("100", "8")].concat(), "800 GPUs are more than 6 layers can use"),
        ([&["partition", &profile][..], &mesh("4", "3")].concat(), "no plan fits: 6 layers in stages of 1, 2 GPUs"),
        (vec!["partition", &profile, "--nodes", "2"], "--gpus-per-node"),
        (vec!["partition", "runs", "--layers", "4", "--gpus", "1"], "4 layers on 1 GPUs"),
        (vec!["partition", "runs", "--layers", "4", "--gpus", "4", "--degrees", "3"], "a degree of 3 is not possible"),
        (vec!["partition", "merge", &unfilled], "run 3: peak_bytes has 0 entries for"),
        (vec!["partition", "merge", &again], "contradictory measurements: runs 0 and "),
        (vec!["partition", "merge", &template], "target_batch_size is missing: write"),
        (vec!["partition", "merge", &good, "--target-batch", "64"], "--target-batch is for --trace"),
        (vec!["partition", "merge", &profile, "--merge-to", "7"], "6 layers cannot be merged to 7"),
        (vec!["partition", "merge", &profile, "-o", &profile], "is the file that is read; write to another"),
        (vec!["partition", "merge", "--trace", "8=x.csv"], "--target-batch"),
        (vec!["partition", "merge", "--trace", "x.csv", "--target-batch", "8"], "write the batch size"),
    ];
    for (args, words) in cases {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty());
    }
}
