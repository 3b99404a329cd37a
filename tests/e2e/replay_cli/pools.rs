//! Which pools a replay runs by name, by flag and by default, and what each of them calls.

use serde_json::Value;

use super::{pool, real};
use crate::support::{run, run_json, stderr};

/// Six iterations that are all alike, and weights that stay.
fn repeating(dir: &tempfile::TempDir) -> String {
    let mut rows = vec!["tick,event,id,bytes,iteration".to_owned(), "0,alloc,0,8388608,0".to_owned()];
    for iteration in 0..6 {
        let requests = (1..9).map(|request| iteration * 100 + request);
        let allocs = requests.clone().map(|id| format!("alloc,{id},12582912,{iteration}"));
        for row in allocs.chain(requests.map(|id| format!("free,{id},,{iteration}"))) {
            rows.push(format!("{},{row}", rows.len()));
        }
    }
    let file = dir.path().join("repeating.csv");
    std::fs::write(&file, rows.join("\n")).unwrap();
    file.to_str().unwrap().to_owned()
}

fn names(shown: &Value) -> Vec<&str> {
    shown["pools"].as_array().unwrap().iter().map(|pool| pool["name"].as_str().unwrap()).collect()
}

#[test]
fn default_is_what_users_get() {
    let dir = tempfile::tempdir().unwrap();
    let file = repeating(&dir);
    let of = |arguments: &[&str]| run_json(&[&["replay", &file, "--json"], arguments].concat());
    let shown = of(&[]);
    assert_eq!(names(&shown), ["stitchd", "stitchd-auto", "stitchd-plan", "caching", "expandable"]);
    let [plain, auto, planned] = ["stitchd", "stitchd-auto", "stitchd-plan"].map(|name| pool(&shown, name));
    assert!(plain["served_bytes"]["planned"] == 0 && plain["auto"].is_null(), "{plain}");
    assert!(auto["auto"]["installed"].as_u64().unwrap() > 0, "{auto}");
    assert_eq!((&planned["served_bytes"]["pool"], &planned["deviations"]), (&0.into(), &0.into()), "{planned}");
    assert!(planned["efficiency_after_plan"].as_f64().unwrap() > 0.99, "{planned}");
    let verdict = shown["verdict"].as_str().unwrap();
    assert!(verdict.contains(" with stitchd (") && verdict.contains(" with stitchd-plan; "), "{verdict}");

    // By flag and by name it is the same pool, and a pool is not shown twice.
    for (flags, name) in [(&["--auto"][..], "stitchd-auto"), (&["--plan-from-iteration", "1"], "stitchd-plan")] {
        let flagged = of(flags);
        assert!(!names(&flagged).contains(&name), "{flags:?}: {:?}", names(&flagged));
        let (mut by_flag, mut by_name) = (pool(&flagged, "stitchd").clone(), pool(&shown, name).clone());
        for shown in [&mut by_flag, &mut by_name] {
            shown.as_object_mut().unwrap().retain(|field, _| field != "name" && field != "efficiency_after_plan");
        }
        assert_eq!(by_flag, by_name, "{flags:?}");
    }
    assert_eq!(names(&of(&["--disable", "plan"])), ["stitchd", "caching", "expandable"]);
}

#[test]
fn pools_by_name_mix_in_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = repeating(&dir);
    let mixed = ["--pool", "stitchd-plan,native,stitchd,stitchd-auto", "--costs", "h200", "--json"];
    let shown = run_json(&[&["replay", &file], &mixed[..]].concat());
    assert_eq!(names(&shown), ["stitchd-plan", "native", "stitchd", "stitchd-auto"]);
    assert_eq!(pool(&shown, "stitchd")["served_bytes"]["planned"], 0);
    assert_eq!(pool(&shown, "stitchd-auto")["cost_table"]["name"], "h200");
}

#[test]
fn pool_without_plan_is_left_out_with_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("once.csv");
    std::fs::write(&file, "tick,event,id,bytes\n1,alloc,1,4194304\n2,free,1,\n").unwrap();
    let once = file.to_str().unwrap();
    let varies = dir.path().join("varies.csv");
    let rows = "tick,event,id,bytes,iteration,dynamic\n1,alloc,1,5120,0,1\n2,free,1,,0,\n3,alloc,2,64,1,1\n";
    std::fs::write(&varies, rows).unwrap();
    let repeating = repeating(&dir);
    for (file, arguments, why) in [
        (once, &[][..], "stitchd-plan is left out: the trace has 1 iteration, "),
        (varies.to_str().unwrap(), &[], "stitchd-plan is left out: no request of the trace can be planned"),
        (&repeating, &["--pool", "stitchd,stitchd-auto", "--disable", "plan"], "stitchd-auto is left out: --disable"),
    ] {
        let shown = run_json(&[&["replay", file, "--json"], arguments].concat());
        let notes = shown["notes"].to_string();
        assert!(notes.contains(why), "{arguments:?}: {notes}");
        assert!(names(&shown).contains(&"stitchd") && !names(&shown).contains(&"stitchd-plan"), "{shown}");
    }
    // Where it was the only one, there is no answer.
    let alone = run(&["replay", once, "--pool", "stitchd-plan"]);
    assert_eq!(alone.status.code(), Some(2));
    assert!(stderr(&alone).contains("--plan-from-iteration 0"), "{}", stderr(&alone));
    let first = run_json(&["replay", once, "--pool", "stitchd-plan", "--plan-from-iteration", "0", "--json"]);
    assert_eq!(names(&first), ["stitchd-plan"]);
    // A plan that no flag asked for does not refuse a disturbance.
    let two = dir.path().join("two.csv");
    let rows: String = (0..4).map(|id| format!("{id},alloc,{id},{},{}\n", 600 + id, id / 2)).collect();
    std::fs::write(&two, format!("tick,event,id,bytes,iteration\n{rows}")).unwrap();
    let shown = run_json(&["replay", two.to_str().unwrap(), "--perturb", "1", "--json"]);
    assert!(shown["notes"].to_string().contains("Add some with --repeat"), "{shown}");
}

#[test]
fn options_about_later_plans_need_a_pool_that_makes_them() {
    let dir = tempfile::tempdir().unwrap();
    let once = dir.path().join("once.csv");
    std::fs::write(&once, "tick,event,id,bytes\n1,alloc,1,4194304\n2,free,1,\n").unwrap();
    let (once, repeating) = (once.to_str().unwrap(), repeating(&dir));
    for (file, arguments, why) in [
        (&*repeating, &["--pool", "stitchd", "--step-seconds", "1"][..], "needs a pool that makes plans"),
        (&repeating, &["--pool", "stitchd-plan", "--contexts", "recorded-only"], "needs a pool that makes plans"),
        (&repeating, &["--pool", "stitchd", "--again"], "needs a pool that makes plans"),
        (once, &["--pool", "stitchd-auto", "--step-seconds", "1"], "more than one iteration"),
        (&repeating, &["--step-seconds", "0"], "from 1e-9 to 86400"),
    ] {
        let output = run(&[&["replay", file], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
    }
    let auto = ["replay", &repeating, "--json", "--pool", "stitchd-auto", "--contexts", "recorded-only"];
    let shown = run_json(&[&auto[..], &["--step-seconds", "3600"]].concat());
    assert_eq!(pool(&shown, "stitchd-auto")["auto"]["from_iteration"], 3);
    assert!(pool(&shown, "stitchd-auto")["auto"]["planning_seconds"].as_f64().unwrap() > 0.0);
    let shown = run_json(&[&auto[..], &["--again"]].concat());
    let plans = &pool(&shown, "stitchd-auto")["auto"];
    assert_eq!((&plans["made"], &plans["from_iteration"]), (&0.into(), &1.into()), "{plans}");
}

#[test]
fn calls_by_iteration_sum_to_the_total() {
    let dir = tempfile::tempdir().unwrap();
    let own = repeating(&dir);
    let resnet = real("resnet50-olla");
    let models = "stitchd,stitchd-plan,caching,expandable,gmlake,stalloc";
    for (file, pools, iterations) in [(&own, "all", 8), (&resnet, models, 5)] {
        let shown = run_json(&["replay", file, "--pool", pools, "--repeat", "2", "--json"]);
        assert_eq!(shown["trace"]["iterations"], iterations);
        for pool in shown["pools"].as_array().unwrap() {
            let calls: Vec<u64> = serde_json::from_value(pool["driver_calls_by_iteration"].clone()).unwrap();
            let total: u64 =
                pool["driver_calls"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
            assert_eq!((calls.len(), calls.iter().sum()), (iterations, total), "{pool}");
            assert_eq!(calls.last(), pool["steady_driver_calls_per_iteration"].as_u64().as_ref(), "{pool}");
        }
        let calls = |name| &pool(&shown, name)["driver_calls_by_iteration"];
        // The static pool is there before the first iteration, and counts to it.
        assert!(calls("stitchd-plan")[0].as_u64().unwrap() > 0 && calls("stitchd-plan")[1] == 0, "{shown}");
        assert_eq!(calls("expandable")[4], 0);
    }
    let text = run(&["replay", &own, "--pool", "stitchd,caching"]).stdout;
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("first iteration  last iteration  driver seconds"), "{text}");
    // Where memory runs out the array ends in that iteration, and still adds up.
    let small = run(&["replay", &own, "--pool", "caching", "--capacity", "64MiB", "--json"]).stdout;
    let small: Value = serde_json::from_slice(&small).unwrap();
    let caching = pool(&small, "caching");
    assert_eq!(caching["driver_calls_by_iteration"].as_array().unwrap().len(), 1, "{caching}");
    assert!(caching["steady_driver_calls_per_iteration"].is_null(), "{caching}");
}
