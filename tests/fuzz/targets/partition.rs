//! Profiles of models and results of profiling runs, and what is made of small ones: fewer layers, more runs, plans.

use stitchd::partition::merge::{Results, merge_layers};
use stitchd::partition::runs::Runs;
use stitchd::partition::{Mesh, Partial, Profile, Table, uniform};

/// Profiles of more layers are only read: a plan takes longer than its length.
const PLANNED_MAX: usize = 6;

pub(crate) fn profile(bytes: &[u8]) {
    if let Ok(profile) = Profile::from_json(bytes) {
        check(&profile);
    }
}

/// What was measured of pipeline parallelism is a profile; the rest may complete one.
pub(crate) fn results(bytes: &[u8]) {
    let Ok(results) = Results::from_json(bytes) else { return };
    let Ok(partial) = results.partial() else { return };
    if let Ok(profile) = Partial::joined([partial.clone()]) {
        check(&profile);
        let twice = Partial::joined([partial, Partial::from(profile.clone())]);
        assert_eq!(twice.expect("what says the same does not contradict it"), profile);
    }
}

fn check(profile: &Profile) {
    let again = Profile::from_json(profile.to_json().to_string().as_bytes());
    assert_eq!(again.expect("a profile that was read reads again"), *profile);
    let layers = profile.layers();
    if layers > PLANNED_MAX {
        return;
    }
    plan(profile);
    let Ok(merged) = merge_layers(profile, layers.div_ceil(2)) else { return };
    assert_eq!(merged.layers(), layers.div_ceil(2));
    let model: usize = profile.layer_sizes().iter().sum();
    assert_eq!(merged.layer_sizes().iter().sum::<usize>(), model);
    plan(&merged);
    let Ok(runs) = Runs::merged(&merged, 8, &[2, 4]) else { return };
    let mut partitions = runs.sets.iter().flat_map(|set| &set.partitions);
    assert!(partitions.all(|partition| partition.iter().sum::<usize>() == model));
    assert!(Results::from_json(runs.to_json().to_string().as_bytes()).is_ok());
}

/// Whatever layers need, a plan has all of them and every GPU once.
fn plan(profile: &Profile) {
    for (nodes, gpus) in [(2, 4), (1, 3)] {
        let mesh = Mesh::new(nodes, gpus).expect("it has GPUs");
        let Ok(table) = Table::new(profile, mesh) else { continue };
        let equal = uniform(&table, mesh);
        let Ok(plan) = table.recommend(mesh) else {
            assert!(equal.is_none(), "stages alike are a plan");
            continue;
        };
        assert!(equal.is_none_or(|equal| plan.peak <= equal.peak));
        let mut next = 0;
        for stage in &plan.stages {
            assert_eq!(stage.group.first, next);
            next = stage.group.last + 1;
        }
        assert_eq!(next, profile.layers());
        let (gpus, bytes): (Vec<usize>, Vec<_>) = plan.gpus().into_iter().unzip();
        assert!(gpus.into_iter().eq(0..mesh.gpus()));
        assert_eq!(bytes.into_iter().max(), Some(plan.peak));
    }
}

fn measurement(parallelism: &str, degree: u64, batch: u64, isolated: &str, added: &str) -> String {
    format!(
        r#"{{"parallelism":"{parallelism}","degree":{degree},"batch_size":{batch},"isolated_bytes":[{isolated}],"added_bytes":[{added}]}}"#
    )
}

fn written(layers: usize, measurements: &[String], more: &str) -> Vec<u8> {
    format!(r#"{{"layers":{layers},"measurements":[{}],{more}}}"#, measurements.join(",")).into_bytes()
}

pub(crate) fn profiles() -> Vec<Vec<u8>> {
    let of = |parallelism, degree, batch| measurement(parallelism, degree, batch, "400,90,80", "null,30,-5");
    let all = [of("pipeline", 1, 4), of("pipeline", 1, 2), of("data", 2, 4), of("data", 4, 2), of("tensor", 4, 2)];
    let two = |batch| measurement("pipeline", 1, batch, "5e9,4611686018427387904", "0,-4611686018427387904");
    let one = [measurement("pipeline", 1, 3, "1", "0"), measurement("tensor", 65536, 1_u64 << 40, "1.5", "0")];
    vec![
        written(3, &all, r#""target_batch_size":8,"schedule":"1f1b","microbatches":4"#),
        written(3, &all, r#""layer_sizes":[2,1,5],"target_batch_size":9,"fit":"inverse""#),
        written(3, &all[1..], r#""target_batch_size":2"#),
        written(2, &[two(1), two(2), two(7)], r#""target_batch_size":1099511627776"#),
        written(1, &one, r#""target_batch_size":3"#),
        written(3, &all[2..], r#""target_batch_size":8"#),
        written(4096, &all, r#""target_batch_size":8,"layer_sizes":[18446744073709551615,1]"#),
        b"{}".to_vec(),
    ]
}

/// Runs with the peaks of a model whose layers add up.
fn filled(runs: &Runs) -> Vec<u8> {
    let mut results = runs.to_json();
    for run in results["runs"].as_array_mut().expect("there are runs") {
        let (degree, batch) = (run["degree"].as_u64().unwrap_or(1), run["batch_size"].as_u64().unwrap_or(1));
        let parts = run["partition"].as_array().expect("it has parts").iter();
        let peaks = parts.map(|part| (700 + part.as_u64().unwrap_or(1) * batch * 90) / degree);
        let peaks: Vec<u64> = peaks.collect();
        run["peak_bytes"] = peaks.into();
    }
    results.to_string().into_bytes()
}

pub(crate) fn all_results() -> Vec<Vec<u8>> {
    let all = filled(&Runs::new(3, 4, &[2], Some(16)).expect("there are enough GPUs"));
    let profile = Profile::from_json(&profiles()[1]).expect("the second is one");
    let merged = filled(&Runs::merged(&profile, 8, &[2]).expect("there are enough GPUs"));
    let run = |partition: &str, peaks: &str| {
        format!(
            r#"{{"parallelism":"pipeline","degree":1,"batch_size":8,"partition":[{partition}],"peak_bytes":[{peaks}]}}"#
        )
    };
    let file = |layers: &str, runs: &[String]| {
        format!(r#"{{"layers":{layers},"target_batch_size":8,"runs":[{}]}}"#, runs.join(",")).into_bytes()
    };
    let sizes = r#"4,"layer_sizes":[1,3]"#;
    vec![
        all,
        merged,
        file(sizes, &[run("1,3", "7,9"), run("4", "12"), run("1,3", "8,9")]),
        file("2", &[run("1,1", "4611686018427387904,1"), run("2", "1")]),
        file("2", &[run("2", "1"), run("1,1", "1,4611686018427387904")]),
        // Few bytes of which much could be said: which run would tell what none does.
        file("4096", &[run("4096", "1")]),
        file("1", &[r#"{"parallelism":"data","degree":1,"batch_size":8,"partition":[1],"traces":["a.csv"]}"#.into()]),
    ]
}
