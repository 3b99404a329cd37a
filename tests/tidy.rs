//! The rules of the house, as tests: who may import whom, where `unsafe` may stand, what the documentation must name.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Everybody may use these; among themselves they go from left to right.
const BASE: [&str; 12] =
    ["units", "limits", "ids", "clock", "error", "rng", "ladder", "sync", "extents", "lifetimes", "mortal", "work"];

/// Module by module, what it may use beside the base. Nothing else, and a module that is not here does not exist.
const MAY_USE: [(&str, &[&str]); 23] = [
    ("driver", &[]),
    ("memory", &["driver"]),
    ("store", &["memory", "driver"]),
    ("ledger", &[]),
    ("journal", &["ledger"]),
    ("steward", &["journal", "ledger", "store"]),
    ("trace", &[]),
    ("plan", &["trace"]),
    ("order", &["plan", "trace"]),
    ("partition", &[]),
    ("pool", &["memory", "plan", "trace"]),
    ("context", &["trace"]),
    ("record", &["context", "pool", "trace"]),
    ("runtime", &["record", "pool", "plan", "trace", "memory", "driver"]),
    ("auto", &["runtime", "record", "plan", "trace"]),
    (
        "replay",
        &["auto", "context", "runtime", "steward", "ledger", "store", "pool", "plan", "trace", "memory", "driver"],
    ),
    ("wire", &[]),
    ("keeper", &["wire"]),
    ("session", &["auto", "wire", "runtime", "record", "plan", "store", "memory", "driver"]),
    (
        "daemon",
        &["keeper", "journal", "session", "wire", "runtime", "plan", "steward", "ledger", "store", "memory", "driver"],
    ),
    (
        "cli",
        &[
            "daemon",
            "keeper",
            "replay",
            "order",
            "partition",
            "session",
            "wire",
            "runtime",
            "pool",
            "plan",
            "trace",
            "steward",
            "memory",
            "driver",
        ],
    ),
    // The package beside this one.
    ("client", &["auto", "session", "runtime", "record", "context", "pool", "plan", "trace"]),
    ("main", &["cli"]),
];

/// Modules that may know what others are told: generated messages, threads and sockets.
const MAY_USE_PROTO: [&str; 6] = ["wire", "session", "daemon", "cli", "journal", "keeper"];
const MAY_USE_TOKIO: [&str; 3] = ["session", "daemon", "cli"];
/// Two threads that end before it answers, and the answer is as if they were one.
const MAY_RACE: [&str; 1] = ["work"];

/// Files with `unsafe`; each opens with its reason.
const UNSAFE: [&str; 33] = [
    "benches/lease.rs",
    "benches/revoke.rs",
    "client/src/ffi/blocks.rs",
    "client/src/ffi/filter.rs",
    "client/src/ffi/raise.rs",
    "client/src/ffi/share.rs",
    "client/src/ffi/sleep.rs",
    "client/src/ffi/statistics.rs",
    "client/src/ffi/torch.rs",
    "client/src/ffi.rs",
    "src/cli/selftest/fork.rs",
    "src/daemon/heap.rs",
    "src/daemon/watched.rs",
    "src/driver/gpu/collectives.rs",
    "src/driver/gpu/locked.rs",
    "src/driver/gpu/nvml.rs",
    "src/driver/gpu/table.rs",
    "src/driver/host.rs",
    "src/keeper/manager.rs",
    "src/session/exit.rs",
    "src/session/fork.rs",
    "src/session/signals.rs",
    "src/session/stats_page.rs",
    "src/wire/peer.rs",
    "tests/conformance/alone.rs",
    "tests/conformance/stall.rs",
    "tests/fuzz/allocations.rs",
    "tests/standin-driver/core/src/addresses.rs",
    "tests/standin-driver/core/src/facade.rs",
    "tests/standin-driver/core/src/machine.rs",
    "tests/standin-driver/core/src/process.rs",
    "tests/standin-driver/cuda/src/lib.rs",
    "tests/standin-driver/hip/src/lib.rs",
];

/// The files that say what PyTorch says, which names its devices by one vendor whoever made them, and find its parts, which have vendors' names.
const SPEAKS_TORCH: [&str; 2] = ["client/src/ffi/torch.rs", "client/src/ffi/raise.rs"];

/// Files that read the environment.
const ENVIRONMENT: [&str; 1] = ["src/session/locate.rs"];

/// Crates that the client library must not carry.
const TOO_THICK: [&str; 12] = [
    "anyhow",
    "axum",
    "clap",
    "csv",
    "dashmap",
    "flate2",
    "indicatif",
    "metrics",
    "serde_json",
    "toml",
    "tonic-health",
    "zstd",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the project with one of these endings, by its path from the root.
fn files(endings: &[&str]) -> Vec<(String, String)> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && name != ".git" {
                walk(&path, found);
            } else if path.is_file() {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(root(), &mut found);
    found.sort();
    let wanted = found.into_iter().filter(|path| endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)));
    wanted
        .map(|path| {
            let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
            (name, std::fs::read_to_string(&path).unwrap())
        })
        .collect()
}

/// The code of a source file: no comments, no tests.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    code.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The module that a source file belongs to.
fn module(name: &str) -> Option<&str> {
    if name.starts_with("client/src/") {
        return Some("client");
    }
    let inside = name.strip_prefix("src/")?;
    Some(inside.split('/').next().unwrap().trim_end_matches(".rs"))
}

fn sources() -> Vec<(String, String)> {
    let mut sources = files(&[".rs"]);
    let is_test = |name: &str| name.ends_with("/tests.rs") || name.contains("/tests/");
    sources.retain(|(name, _)| module(name).is_some() && !is_test(name));
    sources
}

fn fail(what: &str, wrong: &[String]) {
    assert!(wrong.is_empty(), "{what}:\n  {}", wrong.join("\n  "));
}

#[test]
fn modules_import_only_what_the_table_allows() {
    let table: BTreeMap<_, _> = MAY_USE.into_iter().collect();
    let mut wrong = Vec::new();
    for (name, text) in sources() {
        let module = module(&name).unwrap();
        let code = code(&text);
        assert!(!code.contains("use crate::{"), "{name}: one `use` per module, so that this test can read it");
        let used = ["crate::", "stitchd::"].into_iter().flat_map(|of| code.split(of).skip(1).collect::<Vec<_>>());
        let used: BTreeSet<String> = used
            .map(|rest| rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect())
            .filter(|word: &String| BASE.contains(&word.as_str()) || table.contains_key(word.as_str()))
            .collect();
        for used in &used {
            let is_allowed = match BASE.iter().position(|base| *base == module) {
                Some(at) => BASE[..=at].contains(&used.as_str()),
                None if module == "lib" => true,
                None => {
                    let allowed = table.get(module).unwrap_or_else(|| panic!("{name}: no such module in the table"));
                    // Inside the client package `crate::` is its own.
                    used == module || BASE.contains(&used.as_str()) || allowed.contains(&used.as_str())
                }
            };
            if !is_allowed {
                wrong.push(format!("{name} uses {used}"));
            }
        }
    }
    fail("layers are crossed", &wrong);
}

#[test]
fn messages_tokio_and_driver_names_stay_where_they_belong() {
    let mut wrong = Vec::new();
    for (name, text) in sources() {
        let (module, code) = (module(&name).unwrap(), code(&text));
        let speaks_proto = code.contains("v1::") || code.contains("wire::v1");
        if speaks_proto && !MAY_USE_PROTO.contains(&module) {
            wrong.push(format!("{name} knows the messages of the wire"));
        }
        let doors = ["tokio", "thread::spawn", "thread::Builder", "thread::scope", "std::net", "std::os::unix::net"];
        if !MAY_USE_TOKIO.contains(&module)
            && !MAY_RACE.contains(&module)
            && doors.iter().any(|door| code.contains(door))
        {
            wrong.push(format!("{name} knows tokio, threads or sockets"));
        }
        let words = code.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase);
        if module != "driver"
            && !SPEAKS_TORCH.contains(&name.as_str())
            && words.into_iter().any(|word| word == "cuda" || word == "hip")
        {
            wrong.push(format!("{name} names a driver"));
        }
        let names_metrics = ["gauge!(", "counter!(", "histogram!("].iter().any(|call| code.contains(call));
        if !name.starts_with("src/daemon/metrics/") && names_metrics {
            wrong.push(format!("{name} names metrics"));
        }
        if (code.contains("env::var") || code.contains("env::vars")) && !ENVIRONMENT.contains(&name.as_str()) {
            wrong.push(format!("{name} reads the environment"));
        }
    }
    fail("something is known where it should not be", &wrong);
}

#[test]
fn unsafe_code_stands_in_the_files_that_say_why() {
    let mut found = Vec::new();
    for (name, text) in files(&[".rs"]) {
        let has_unsafe = text.lines().any(|line| {
            let code = line.split("//").next().unwrap();
            code.contains("unsafe {")
                || code.contains("unsafe fn")
                || code.contains("unsafe impl")
                || code.contains("unsafe(")
        });
        if has_unsafe && name != "tests/tidy.rs" {
            assert!(text.contains("#![expect(unsafe_code, reason = \""), "{name} has unsafe code and does not say why");
            found.push(name);
        }
    }
    assert_eq!(found, UNSAFE, "the list of files with unsafe code");
}

#[test]
fn every_file_says_what_it_is_for_and_leaves_nothing_undone() {
    // Put together here, so that this file does not contain them.
    let undone = [["TO", "DO"], ["FIX", "ME"], ["XX", "X"], ["todo", "!("], ["unimplemented", "!("], ["#[ign", "ore"]];
    let undone = undone.map(|halves| halves.concat());
    let mut wrong = Vec::new();
    for (name, text) in files(&[".rs"]) {
        if !text.starts_with("//! ") {
            wrong.push(format!("{name} does not begin with what it is for"));
        }
        for mark in &undone {
            if text.contains(mark.as_str()) {
                wrong.push(format!("{name} has {mark}"));
            }
        }
        let lines = text.lines().count();
        if lines > 900 {
            wrong.push(format!("{name} has {lines} lines: do two nouns live there?"));
        }
    }
    fail("files are unfinished", &wrong);
}

#[test]
fn every_block_of_code_in_a_document_names_its_language() {
    // What has no name in the README is compiled as Rust with the crate's documentation.
    let mut wrong = Vec::new();
    for (name, text) in files(&[".md"]) {
        let fences = text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("```"));
        let nameless = fences.step_by(2).filter(|(_, line)| line.trim() == "```");
        wrong.extend(nameless.map(|(at, _)| format!("{name}:{}", at + 1)));
    }
    fail("blocks without a language (sh, text, toml)", &wrong);
}

#[test]
fn no_file_knows_a_machine() {
    let places = [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"]].map(|halves| halves.concat());
    let mut wrong = Vec::new();
    for (name, text) in files(&[".rs", ".toml", ".md", ".proto", ".h", ".c", ".py", "run"]) {
        for (number, line) in text.lines().enumerate() {
            if places.iter().any(|place| line.contains(place.as_str())) {
                wrong.push(format!("{name}:{}: {line}", number + 1));
            }
        }
    }
    fail("paths of one machine", &wrong);
}

/// Words in backquotes that look like these.
fn quoted(text: &str, looks_right: impl Fn(&str) -> bool) -> BTreeSet<String> {
    text.split('`').skip(1).step_by(2).filter(|word| looks_right(word)).map(str::to_owned).collect()
}

#[test]
fn every_alert_has_a_runbook_and_is_tested_both_ways_and_watches_what_there_is() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let (alerts, tests, docs) =
        (read("deploy/prometheus/alerts.yaml"), read("deploy/prometheus/tests.yaml"), read("deploy/README.md"));
    let named = |text: &str, key: &str| -> BTreeSet<String> {
        text.lines().filter_map(|line| line.trim().strip_prefix(key)).map(|name| name.trim().to_owned()).collect()
    };
    let names = named(&alerts, "- alert:");
    assert!(names.len() >= 10, "{names:?}");
    let books: BTreeSet<String> = std::fs::read_dir(root().join("deploy/runbooks"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap().replace(".md", ""))
        .collect();
    assert_eq!(books, names, "runbooks, and alerts");
    let cases = named(&tests, "- name:");
    for name in &names {
        assert!(alerts.contains(&format!("runbook_url: runbooks/{name}.md")), "{name} names its runbook");
        assert!(docs.contains(&format!("runbooks/{name}.md")), "{name} is in deploy/README.md");
        for how in ["fires", "does not"] {
            assert!(cases.contains(&format!("{name} {how}")), "{name} {how}");
        }
    }
    for rule in named(&read("deploy/prometheus/rules.yaml"), "- record:") {
        assert!(tests.contains(&format!("- expr: '{rule}'")), "{rule} is tested");
    }
    // Rules read no metric that there is not.
    let known = quoted(&docs, |word| word.starts_with("stitchd_") || word.starts_with("process_"));
    let rules = alerts + &read("deploy/prometheus/rules.yaml");
    let words = rules.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    for word in words.filter(|word| word.starts_with("stitchd_") || word.starts_with("process_")) {
        let series = ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word);
        assert!(known.contains(series) || known.contains(word), "{word} is no metric");
    }
}

#[test]
fn every_metric_and_configuration_key_is_documented() {
    let docs = std::fs::read_to_string(root().join("deploy/README.md")).unwrap();
    let parts = files(&[".rs"]).into_iter().filter(|(name, _)| name.starts_with("src/daemon/metrics/"));
    let is_metric =
        |word: &&str| ["stitchd_", "process_"].iter().any(|kind| word.starts_with(kind)) && !word.contains(' ');
    let words = |text: &str| code(text).split('"').skip(1).step_by(2).filter(is_metric).map(str::to_owned).collect();
    let names: BTreeSet<String> = parts.flat_map(|(_, text)| -> Vec<String> { words(&text) }).collect();
    assert!(names.len() >= 10, "{names:?}");
    let documented = quoted(&docs, |word| word.starts_with("stitchd_") || word.starts_with("process_"));
    assert_eq!(documented, names, "metrics in deploy/README.md, and those that there are");

    let printed = Command::new(env!("CARGO_BIN_EXE_stitchd"))
        .args(["serve", "--print-config", "--device=0=1GiB", "--http=127.0.0.1:1"])
        .output()
        .unwrap();
    let config: toml::Table = String::from_utf8(printed.stdout).unwrap().parse().unwrap();
    let mut keys: BTreeSet<String> = config.keys().cloned().collect();
    for device in config["device"].as_array().unwrap() {
        keys.extend(device.as_table().unwrap().keys().map(|key| format!("device.{key}")));
    }
    // Not set by default, and so not printed.
    keys.extend(["session_limit", "guarantee_max", "plans", "socket_group", "state_dir"].map(str::to_owned));
    let of_tenant = ["name", "uids", "pods", "limit", "guarantee", "guarantee_max", "lend", "priority"];
    keys.extend(of_tenant.map(|key| format!("tenant.{key}")));
    keys.remove("device");
    let table = docs.split("| key |").nth(1).expect("a table of keys").split("\n\n").next().unwrap();
    let documented: BTreeSet<String> =
        table.lines().skip(2).filter_map(|row| row.split('`').nth(1)).map(str::to_owned).collect();
    assert_eq!(documented, keys, "configuration keys in deploy/README.md, and those that there are");
}

#[test]
fn what_the_readme_promises_is_held_by_a_test_that_exists() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let tests: String = files(&[".rs"]).into_iter().map(|(_, text)| text).collect();
    let promised = quoted(&readme, |word| word.contains("::") && word.contains('_') && !word.contains(' '));
    assert!(promised.len() >= 8, "the promises table names its tests: {promised:?}");
    let missing: Vec<String> = promised
        .into_iter()
        .filter(|path| !tests.contains(&format!("#[test]\nfn {}(", path.rsplit("::").next().unwrap())))
        .collect();
    fail("tests that the README names and nobody wrote", &missing);
}

fn cargo(arguments: &[&str]) -> Option<String> {
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(root()).output().unwrap();
    if !output.status.success() {
        println!("SKIP: cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn no_binary_wants_a_function_of_a_gpu_library() {
    // The library beside the binary: cargo builds it for the workspace's tests, not for those of this package alone.
    let binary = Path::new(env!("CARGO_BIN_EXE_stitchd"));
    let library = binary.with_file_name("libstitchd_client.so");
    let is_gpus = |name: &&str| {
        ["cu", "hip", "nvml", "nccl"].iter().any(|prefix| {
            name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
        })
    };
    let known = ["cuInit", "hipMemMap", "nvmlInit_v2", "ncclAllReduce"];
    assert!(known.iter().all(is_gpus) && ![&"malloc", &"curl_easy_init"].into_iter().any(is_gpus));
    let mut wrong = Vec::new();
    for file in [binary, &library] {
        if !file.exists() {
            println!("SKIP: {} was not built", file.display());
            continue;
        }
        let Ok(symbols) = Command::new("nm").args(["-D", "--undefined-only"]).arg(file).output() else {
            println!("SKIP: there is no `nm` to look at symbols with");
            return;
        };
        assert!(symbols.status.success(), "{}", String::from_utf8_lossy(&symbols.stderr));
        let text = String::from_utf8_lossy(&symbols.stdout).into_owned();
        let names: Vec<_> = text.split_whitespace().map(|name| name.split('@').next().unwrap()).collect();
        assert!(names.contains(&"malloc"), "what any program wants is found: {names:?}");
        wrong.extend(names.into_iter().filter(is_gpus).map(|name| format!("{} wants {name}", file.display())));
    }
    fail("functions that only a machine with a GPU has", &wrong);
}

#[test]
fn licences_are_those_of_the_list() {
    // Crates of other platforms are not there to be looked at.
    let platform = format!("--filter-platform={}-unknown-linux-gnu", std::env::consts::ARCH);
    let arguments = ["metadata", "--format-version=1", "--offline", "--locked", &platform];
    let Some(metadata) = cargo(&arguments) else { return };
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap();
    let deny: toml::Table = std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap();
    let allowed: BTreeSet<&str> =
        deny["licenses"]["allow"].as_array().unwrap().iter().map(|licence| licence.as_str().unwrap()).collect();
    let mut wrong = Vec::new();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "{} packages", packages.len());
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none");
        // Every part of an AND needs a choice that is allowed; brackets only make this stricter than the expression is.
        let is_allowed = |choice: &str| allowed.contains(choice.trim().trim_matches(['(', ')']));
        let expression = licence.replace('/', " OR ");
        if !expression.split(" AND ").all(|part| part.split(" OR ").any(is_allowed)) {
            wrong.push(format!("{} has {licence}", package["name"]));
        }
    }
    fail("licences that deny.toml does not allow", &wrong);
}

#[test]
fn the_client_library_is_thin() {
    let arguments =
        ["tree", "-p", "stitchd-client", "-e", "normal,no-proc-macro", "--prefix=none", "--offline", "--locked"];
    let Some(tree) = cargo(&arguments) else { return };
    let crates: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(crates.contains("tonic"), "{tree}");
    let thick: Vec<String> =
        TOO_THICK.iter().filter(|name| crates.contains(*name)).map(|name| (*name).to_owned()).collect();
    fail("crates that a training process should not load", &thick);
}
