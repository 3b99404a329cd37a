//! The command line: exit codes, errors that say what to do, help.

use crate::support::{TestDaemon, driver_name, run, run_json, stderr};

#[test]
fn exit_codes_and_errors_say_what_happened() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("broken.csv"), "tick,event,id,bytes\n1,alloc,1,100\n2,free,7,\n").unwrap();
    std::fs::write(path("header.csv"), "id,bytes,event\n").unwrap();
    std::fs::write(path("other.csv"), "a,b,c\n").unwrap();
    std::fs::write(path("short.plan"), "STPL").unwrap();
    std::fs::write(path("good.csv"), "tick,event,id,bytes\n1,alloc,1,100\n2,free,1,\n").unwrap();
    let nowhere = path("none.sock");
    // Listened at by somebody who says nothing, as a daemon that hangs does.
    let silent = path("silent.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let cases: [(&[&str], i32, &str); 16] = [
        (
            &["status", "--socket", &nowhere],
            3,
            "none.sock: No such file or directory (os error 2); start one with `stitchd serve`",
        ),
        (&["sessions", "--socket", &nowhere], 3, "no stitchd daemon answers"),
        (&["health", "--socket", &nowhere], 3, "no stitchd daemon answers"),
        (&["health", "--socket", &silent, "--timeout", "100ms"], 3, "no answer in time"),
        (&["plans", "--socket", &nowhere], 3, "no stitchd daemon answers"),
        (&["plan", &path("broken.csv")], 2, "line 3, column 'id': 7 was never allocated"),
        (&["plan", &path("header.csv")], 2, "there is no column 'tick'"),
        (&["plan", &path("other.csv")], 2, "other.csv: this is nothing known; what can be read: a trace"),
        (&["plan", &path("missing.csv")], 2, "missing.csv: cannot open it: No such file"),
        (&["plan", dir.path().to_str().unwrap()], 2, "cannot open"),
        (&["plan", &path("good.csv"), "--from-iteration", "9"], 2, "there is no iteration 9; the trace has 1"),
        (&["plan", &path("good.csv"), "--solver", "magic"], 2, "there are first-fit/"),
        (&["plan", &path("good.csv"), "-o", "/nowhere/x.plan"], 2, "/nowhere/x.plan"),
        (&["plan", "show", &path("short.plan")], 2, "this is not a plan file"),
        (&["plan"], 2, "Usage"),
        (&["frobnicate"], 2, "unrecognized subcommand"),
    ];
    for (args, code, words) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?} says {:?}, not {words:?}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?} prints on standard output");
    }
}

#[test]
fn what_cannot_be_printed_is_an_error_and_not_a_bug() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = crate::support::stitchd().args(["serve", "--print-config"]).stdout(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot write to standard output"), "{}", stderr(&output));
    let json = run_json(&["serve", "--driver=host", "--device=0=1GiB", "--print-config", "--json"]);
    assert_eq!((&json["driver"], &json["device"][0]["ordinal"]), (&"host".into(), &0.into()), "{json}");
    // Somebody who has gone is nobody to tell.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    drop(reader);
    let output = crate::support::stitchd().args(["serve", "--print-config"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn every_command_has_help_with_an_example() {
    let output = run(&["--help"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("stitchd demo"));
    // As they are listed: each behind two spaces.
    let listed = text.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = listed.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let commands: Vec<&str> = names.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(["demo", "keep"].iter().all(|name| commands.contains(name)), "{commands:?}");
    for command in commands.into_iter().filter(|command| *command != "help") {
        let output = run(&[command, "--help"]);
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Example") && text.contains(&format!("stitchd {command}")), "{text}");
        assert!(text.contains("--json"), "{text}");
    }
}

#[test]
fn commands_print_tables_for_people() {
    let daemon = TestDaemon::start(64);
    let _session = daemon.runtime("a trainer");
    let text = |args: &[&str]| {
        let output = daemon.cli(args);
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let status = text(&["status"]);
    assert!(status.contains("64.0 MiB") && status.contains(&format!("on the {} driver", driver_name())), "{status}");
    assert!(text(&["sessions"]).contains("a trainer"));
    assert_eq!(text(&["plans"]), "no plans\n");
    assert_eq!(text(&["health"]), "serving\n");
    assert_eq!(daemon.cli_json(&["health"])["serving"], true);
}

#[test]
fn a_plan_is_described_for_people_and_for_scripts() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("t.csv");
    std::fs::write(
        &trace,
        "tick,event,id,bytes,phase\n1,alloc,1,1000,init\n2,alloc,2,5000,forward\n3,free,2,,forward\n",
    )
    .unwrap();
    let trace = trace.to_str().unwrap();
    let made = run_json(&["plan", trace, "--json"]);
    for key in [
        "buffers",
        "lower_bound_bytes",
        "peak_bytes",
        "gap",
        "solver",
        "seconds",
        "work_units",
        "proven_optimal",
        "static_requests",
        "dynamic_requests",
        "static_pool_bytes",
        "reuse_groups",
    ] {
        assert!(!made[key].is_null(), "{key} is missing: {made}");
    }
    assert_eq!(made["peak_bytes"], 1024 + 5120);
    let output = run(&["plan", trace]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("optimal"));
}

#[test]
fn whoever_has_seen_enough_may_close_the_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("job.plan");
    let trace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/resnet50-olla.csv.zst");
    run(&["plan", trace.to_str().unwrap(), "-o", plan.to_str().unwrap()]);
    for more in [&[][..], &["--json"]] {
        let mut show = crate::support::stitchd()
            .args(["plan", "show", plan.to_str().unwrap()])
            .args(more)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        drop(show.stdout.take());
        let output = show.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", crate::support::stderr(&output));
    }
}

#[test]
fn the_manifests_say_what_the_program_understands() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes/daemonset.yaml");
    let manifest = std::fs::read_to_string(path).unwrap();
    let flags_of = |command: &str| {
        let from = manifest.split_once(&format!("command: [stitchd, {command}]")).unwrap().1;
        let lines = from.lines().map(str::trim).skip_while(|line| *line != "args:").skip(1);
        lines.map_while(|line| line.strip_prefix("- --").map(|flag| format!("--{flag}"))).collect::<Vec<_>>()
    };
    let serve = flags_of("serve");
    let mut args: Vec<&str> = vec!["serve", "--print-config"];
    // What the file says is in the ConfigMap: `deploy/check` has the program read it.
    args.extend(serve.iter().map(String::as_str).filter(|flag| !flag.starts_with("--config=")));
    let output = run(&args);
    let config = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(config.contains("state_dir = \"/run/stitchd-state\"") && config.contains("0.0.0.0:9464"), "{config}");
    // The keeper finds the daemon, and clients find neither the one nor the journal.
    assert_eq!(flags_of("keep"), ["--state-dir=/run/stitchd-state"]);
    assert!(String::from_utf8(run(&["keep", "--help"]).stdout).unwrap().contains("--state-dir <DIR>"));
}

/// Names of all fields, but for those of an object whose own names are data.
fn fields(of: &serde_json::Value, into: &mut std::collections::BTreeSet<String>) {
    match of {
        serde_json::Value::Object(object) => {
            for (name, value) in object {
                into.insert(name.clone());
                if name != "counters" {
                    fields(value, into);
                }
            }
        }
        serde_json::Value::Array(all) => all.iter().for_each(|one| fields(one, into)),
        _ => {}
    }
}

#[test]
fn every_field_of_an_answer_is_in_the_documents() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let missing = |document: &str, answers: &[serde_json::Value]| -> Vec<String> {
        let text = std::fs::read_to_string(root.join(document)).unwrap();
        let mut names = std::collections::BTreeSet::new();
        answers.iter().for_each(|answer| fields(answer, &mut names));
        assert!(names.len() > 20, "{names:?}");
        names.into_iter().filter(|name| !text.contains(&format!("`{name}`"))).collect()
    };
    let dir = tempfile::tempdir().unwrap();
    let problem = dir.path().join("problem.csv");
    std::fs::write(&problem, "id,lower,upper,size\na,0,2,3\nb,1,3,4\n").unwrap();
    let data = |name: &str| root.join("tests/data").join(name).to_str().unwrap().to_owned();
    let profile = dir.path().join("profile.json");
    let measured = |parallelism: &str, degree: u64, batch: u64| {
        let bytes = [batch << 20, batch << 20];
        serde_json::json!({"parallelism": parallelism, "degree": degree, "batch_size": batch, "isolated_bytes": bytes, "added_bytes": bytes})
    };
    let measurements =
        [measured("pipeline", 1, 8), measured("pipeline", 1, 16), measured("data", 2, 8), measured("data", 2, 16)];
    let whole = serde_json::json!({"layers": 2, "target_batch_size": 16, "measurements": measurements});
    std::fs::write(&profile, whole.to_string()).unwrap();
    let answers = [
        run_json(&["plan", problem.to_str().unwrap(), "--json"]),
        run_json(&["plan", &data("resnet50-olla.csv.zst"), "--json"]),
        run_json(&["order", &data("graphs/alexnet-1.json.zst"), "--json"]),
        run_json(&[
            "partition",
            profile.to_str().unwrap(),
            "--nodes",
            "1",
            "--gpus-per-node",
            "2",
            "--memory",
            "1GiB",
            "--json",
        ]),
    ];
    assert_eq!(missing("README.md", &answers), [""; 0]);
    let daemon = TestDaemon::start(64);
    let session = daemon.session("job");
    let runtime = session.runtime(0, stitchd::runtime::RuntimeConfig::default()).unwrap();
    runtime.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(4))).unwrap();
    let of_daemon = [daemon.status(), daemon.cli_json(&["sessions"]), daemon.cli_json(&["top"])];
    assert_eq!(missing("deploy/README.md", &of_daemon), [""; 0]);
}
