//! Plans against all plans, runs against the models that they measure, and what is refused.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::enumerate::enumerate;
use super::merge::{Results, merge_layers};
use super::runs::Runs;
use super::*;
use crate::error::{ErrorKind, chain};
use crate::rng::Rng;
use crate::units::Bytes;

/// Degrees that were measured in a random profile, with data and with tensor parallelism.
const MEASURED: [&[u32]; 4] = [&[], &[2], &[2, 4], &[4, 8]];

/// A profile with few different figures, so that much is equal.
fn random(rng: &mut Rng, layers: usize) -> Profile {
    let mut measurements = Vec::new();
    let mut add = |rng: &mut Rng, parallelism, degree: u32| {
        for batch_size in [2, 4] {
            let bytes = |rng: &mut Rng| 120 / u64::from(degree) * (1 + rng.below(3)) * batch_size;
            let isolated = (0..layers).map(|_| Bytes::new(400 + bytes(rng))).collect();
            let added = (0..layers).map(|_| bytes(rng) as i64 / 2).collect();
            measurements.push(Measurement { parallelism, degree, batch_size, isolated, added });
        }
    };
    add(rng, Parallelism::Pipeline, 1);
    for parallelism in [Parallelism::Data, Parallelism::Tensor] {
        for degree in MEASURED[rng.index(4)] {
            add(rng, parallelism, *degree);
        }
    }
    let profile = Profile::new(vec![1; layers], measurements, 8).unwrap();
    let schedule = if rng.chance(500) { Schedule::GPipe } else { Schedule::OneForwardOneBackward };
    profile.scheduled(schedule, 1 + rng.below(4)).unwrap()
}

/// Every plan there is, tried one by one and node by node: the least list of different amounts, and how many plans there are.
struct Brute {
    predictor: Predictor,
    configs: Vec<Config>,
    layers: usize,
    mesh: Mesh,
    least: Option<Vec<u64>>,
    plans: u64,
}

impl Brute {
    fn of(profile: &Profile, mesh: Mesh) -> Brute {
        let predictor = Predictor::new(profile);
        let configs = predictor.configs(mesh.degree_max());
        let layers = profile.layers();
        let mut brute = Brute { predictor, configs, layers, mesh, least: None, plans: 0 };
        brute.cut(&mut Vec::new());
        brute
    }

    fn cut(&mut self, stages: &mut Vec<(Group, Config)>) {
        let first = stages.last().map_or(0, |(group, _)| group.last + 1);
        let used: usize = stages.iter().map(|(_, config)| config.degree as usize).sum();
        if first == self.layers {
            if used == self.mesh.gpus() && self.fits(stages, &mut vec![self.mesh.gpus_per_node(); self.mesh.nodes()]) {
                self.plan(stages);
            }
            return;
        }
        if used >= self.mesh.gpus() {
            return;
        }
        for last in first..self.layers {
            for config in self.configs.clone() {
                stages.push((Group { first, last }, config));
                self.cut(stages);
                stages.pop();
            }
        }
    }

    fn fits(&self, stages: &[(Group, Config)], room: &mut Vec<usize>) -> bool {
        let Some(((_, config), rest)) = stages.split_first() else { return true };
        let degree = config.degree as usize;
        for node in 0..room.len() {
            if room[node] >= degree {
                room[node] -= degree;
                let is_fit = self.fits(rest, room);
                room[node] += degree;
                if is_fit {
                    return true;
                }
            }
        }
        false
    }

    fn plan(&mut self, stages: &[(Group, Config)]) {
        self.plans += 1;
        let bytes = stages.iter().enumerate().map(|(at, (group, config))| {
            self.predictor.stage(*group, *config, (stages.len() - at) as u64).unwrap().get()
        });
        let amounts: BTreeSet<u64> = bytes.collect();
        let amounts: Vec<u64> = amounts.into_iter().rev().collect();
        if self.least.as_ref().is_none_or(|least| amounts < *least) {
            self.least = Some(amounts);
        }
    }
}

/// Whether a plan is one, told without knowing how it was made. Its different amounts, the largest first.
fn check(plan: &Plan, profile: &Profile, mesh: Mesh) -> Vec<u64> {
    let predictor = Predictor::new(profile);
    let (mut next, mut gpus, mut amounts) = (0, BTreeSet::new(), BTreeSet::new());
    for (at, stage) in plan.stages.iter().enumerate() {
        assert_eq!(stage.group.first, next, "{plan:?}");
        assert!(stage.group.last >= stage.group.first, "{plan:?}");
        next = stage.group.last + 1;
        let degree = stage.config.degree;
        assert!(degree.is_power_of_two() && stage.gpus.len() == degree as usize, "{plan:?}");
        assert_eq!(degree == 1, stage.config.parallelism == Parallelism::Pipeline, "{plan:?}");
        let nodes: BTreeSet<usize> = stage.gpus.iter().map(|gpu| gpu / mesh.gpus_per_node()).collect();
        assert_eq!(nodes.len(), 1, "{plan:?}");
        assert!(stage.gpus.iter().all(|gpu| *gpu < mesh.gpus() && gpus.insert(*gpu)), "{plan:?}");
        let from_end = (plan.stages.len() - at) as u64;
        assert_eq!(predictor.stage(stage.group, stage.config, from_end).unwrap(), stage.predicted, "{plan:?}");
        amounts.insert(stage.predicted.get());
    }
    assert_eq!((next, gpus.len()), (profile.layers(), mesh.gpus()), "{plan:?}");
    assert_eq!(amounts.last().copied(), Some(plan.peak.get()), "{plan:?}");
    amounts.into_iter().rev().collect()
}

#[test]
fn no_plan_of_all_plans_is_better() {
    let mut rng = Rng::new(20_241_126);
    let (mut planned, mut refused, mut ties) = (0, 0, 0);
    while planned < 1500 {
        let layers = 1 + rng.index(6);
        let mesh = Mesh::new(1 + rng.index(3), 1 + rng.index(6)).unwrap();
        let profile = random(&mut rng, layers);
        let brute = Brute::of(&profile, mesh);
        match recommend(&profile, mesh) {
            Ok(plan) => {
                planned += 1;
                let amounts = check(&plan, &profile, mesh);
                assert_eq!(Some(&amounts), brute.least.as_ref(), "{mesh:?} {profile:?}");
                assert_eq!(plan.considered, brute.plans, "{mesh:?} {profile:?}");
                assert_eq!(recommend(&profile, mesh).unwrap(), plan);
                ties += usize::from(amounts.len() > 1);
                let table = Table::new(&profile, mesh).unwrap();
                if let Some(uniform) = uniform(&table, mesh) {
                    assert!(plan.peak <= uniform.peak);
                    assert_eq!(uniform.stages.last().unwrap().0.last + 1, layers);
                }
                if profile.schedule() == Schedule::GPipe {
                    for prunes in [false, true] {
                        let found = enumerate(&table, mesh, prunes, u64::MAX).unwrap();
                        let found_amounts: Vec<u64> = found.amounts.iter().map(|bytes| bytes.get()).collect();
                        assert_eq!(found_amounts, amounts);
                        assert!(if prunes { found.plans <= brute.plans } else { found.plans == brute.plans });
                    }
                }
            }
            Err(error) => {
                refused += 1;
                assert_eq!(brute.plans, 0, "{mesh:?} {error} {profile:?}");
                assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
            }
        }
    }
    assert!(refused > 100 && ties > 500, "{refused} refused, {ties} with more than one amount");
}

/// Layers that all need the same.
fn alike(layers: usize, gpus_per_node: usize) -> (Profile, Mesh) {
    let of = |parallelism, degree: u32, batch_size: u64| {
        let bytes = Bytes::gib(8).get() / u64::from(degree) + batch_size;
        let isolated = vec![Bytes::new(bytes); layers];
        Measurement { parallelism, degree, batch_size, isolated, added: vec![bytes as i64 / 2; layers] }
    };
    let all = [(Parallelism::Pipeline, 1), (Parallelism::Data, 2), (Parallelism::Data, 4)];
    let all = all.into_iter().flat_map(|(parallelism, degree)| [256, 512].map(|batch| of(parallelism, degree, batch)));
    let profile = Profile::new(vec![1; layers], all.collect(), 1024).unwrap();
    (profile, Mesh::new(2, gpus_per_node).unwrap())
}

#[test]
fn what_cannot_be_planned_says_why() {
    let text = |profile: &Profile, mesh| recommend(profile, mesh).unwrap_err().to_string();
    let (profile, mesh) = alike(1, 8);
    let error = text(&profile, mesh);
    assert!(error.contains("16 GPUs are more than 1 layers can use") && error.contains("8 together"), "{error}");
    // Two layers cannot fill two nodes of three: 2 + 1 each makes four stages.
    let (profile, mesh) = alike(3, 3);
    let error = text(&profile, mesh);
    assert!(error.contains("3 layers in stages of 1, 2 GPUs do not fill 2 nodes of 3 exactly"), "{error}");
    assert!(Mesh::new(0, 4).is_err() && Mesh::new(usize::MAX, 4).is_err());
    let (profile, _) = alike(128, 8);
    let error = text(&profile, Mesh::new(64, 7).unwrap());
    assert!(error.contains("are more than the search takes"), "{error}");
}

/// A model whose layers need what they need wherever they are: isolated and added bytes of each, per kind, degree and batch.
fn additive(rng: &mut Rng, layers: usize, degree: u32, batch: u64) -> (Vec<u64>, Vec<i64>) {
    let isolated = (0..layers).map(|_| 10_000 / u64::from(degree) + rng.below(5000) * batch).collect();
    let added = (0..layers).map(|layer| if layer == 0 { 0 } else { rng.below(900) as i64 - 100 }).collect();
    (isolated, added)
}

#[test]
fn runs_that_measure_an_additive_model_give_it_back() {
    let mut rng = Rng::new(5);
    for (layers, gpus) in [(1, 1), (1, 4), (2, 2), (2, 8), (5, 2), (7, 3), (12, 8), (23, 8), (31, 31), (16, 12)] {
        let runs = Runs::new(layers, gpus, &[2, 4], Some(64)).unwrap();
        let mut results = runs.to_json();
        let mut models = std::collections::BTreeMap::new();
        for run in results["runs"].as_array_mut().unwrap() {
            let (degree, batch) = (run["degree"].as_u64().unwrap(), run["batch_size"].as_u64().unwrap());
            let key = (run["parallelism"].as_str().unwrap().to_owned(), degree, batch);
            let model = models.entry(key).or_insert_with(|| additive(&mut rng, layers, degree as u32, batch));
            let mut next = 0;
            let peaks = run["partition"].as_array().unwrap().iter().map(|size| {
                let first = next;
                next += size.as_u64().unwrap() as usize;
                model.0[first] as i64 + model.1[first + 1..next].iter().sum::<i64>()
            });
            let peaks: Vec<i64> = peaks.collect();
            run["peak_bytes"] = json!(peaks);
        }
        let profile = Results::from_json(results.to_string().as_bytes()).unwrap().profile().unwrap();
        assert_eq!(profile.measurements().len(), models.len());
        for one in profile.measurements() {
            let key = (one.parallelism.name().to_owned(), u64::from(one.degree), one.batch_size);
            let isolated: Vec<u64> = one.isolated.iter().map(|bytes| bytes.get()).collect();
            assert_eq!((&isolated, &one.added), (&models[&key].0, &models[&key].1), "{layers} on {gpus}: {key:?}");
        }
        // And the file of the profile is the profile.
        assert_eq!(Profile::from_json(profile.to_json().to_string().as_bytes()).unwrap(), profile);
    }
}

#[test]
fn results_that_tell_too_little_say_which_run_is_missing() {
    let run = |partition: &[u64], peaks: Value| json!({ "parallelism": "pipeline", "degree": 1, "batch_size": 8, "partition": partition, "peak_bytes": peaks });
    let text = |runs: &[Value]| {
        let file = json!({ "layers": 4, "gpus": 4, "target_batch_size": 16, "runs": runs });
        let results = Results::from_json(file.to_string().as_bytes()).unwrap();
        chain(&results.profile().unwrap_err())
    };
    let all = [
        run(&[1, 1, 1, 1], json!([10, 20, 30, 40])),
        run(&[3, 1], json!([30, 40])),
        run(&[2, 1, 1], json!([15, 30, 40])),
        run(&[2, 2], json!([15, 50])),
    ];
    let file = json!({ "layers": 4, "target_batch_size": 16, "runs": all });
    let profile = Results::from_json(file.to_string().as_bytes()).unwrap().profile().unwrap();
    assert_eq!(profile.measurements()[0].added, [0, 5, 15, 20]);
    let error = text(&all[..3]);
    assert!(
        error.contains("at batch size 8 tells added_bytes of layer 3: one with the partition [2, 2] would"),
        "{error}"
    );
    let error = text(&[run(&[2, 2], json!([15])), all[0].clone()]);
    assert!(error.contains("run 0: peak_bytes has 1 entries for 2 parts"), "{error}");
    let error = text(&[run(&[2, 3], json!([15, 1]))]);
    assert!(error.contains("run 0: its partition has 5 layers in 2 parts, and the model has 4"), "{error}");
    let error = text(&[run(&[2, 2], json!([15, 0]))]);
    assert!(error.contains("run 0: one of peak_bytes is missing or 0"), "{error}");
    assert!(text(&[run(&[4], Value::Null)]).contains("run 0: peak_bytes has 0 entries for 1 parts"));
    assert!(text(&[]).contains("0 measurements") || text(&[]).contains("no measurement"));
}

#[test]
fn layers_are_merged_that_need_least_together() {
    let of = |parallelism, degree, batch_size, isolated: &[u64], added: &[i64]| {
        let isolated = isolated.iter().map(|bytes| Bytes::new(*bytes)).collect();
        Measurement { parallelism, degree, batch_size, isolated, added: added.to_vec() }
    };
    let measurements = vec![
        // Together: 0 and 1 need 130, 1 and 2 140, 2 and 3 95; then 0 and 1 130, 1 and 2,3 155.
        of(Parallelism::Pipeline, 1, 4, &[100, 90, 80, 70], &[0, 30, 50, 15]),
        of(Parallelism::Pipeline, 1, 2, &[1, 1, 900, 900], &[0, 1, 1, 1]),
        of(Parallelism::Tensor, 2, 4, &[60, 50, 40, 30], &[0, 20, 25, 10]),
    ];
    let profile = Profile::new(vec![1; 4], measurements, 8).unwrap();
    let three = merge_layers(&profile, 3).unwrap();
    assert_eq!(three.layer_sizes(), [1, 1, 2]);
    let two = merge_layers(&three, 2).unwrap();
    assert_eq!((two.layer_sizes(), two == merge_layers(&profile, 2).unwrap()), ([2, 2].as_slice(), true));
    let figures = |at: usize| {
        let one = &two.measurements()[at];
        (one.isolated.iter().map(|bytes| bytes.get()).collect::<Vec<_>>(), one.added.clone())
    };
    assert_eq!(figures(1), (vec![130, 95], vec![0, 65]));
    assert_eq!(figures(2), (vec![80, 50], vec![0, 35]));
    // Stages of whole merged layers need what they needed.
    let predictor = |profile| Predictor::new(profile);
    let alone = Config { parallelism: Parallelism::Pipeline, degree: 1 };
    assert_eq!(
        predictor(&two).at(Group { first: 0, last: 1 }, alone, 8.0).unwrap(),
        predictor(&profile).at(Group { first: 0, last: 3 }, alone, 8.0).unwrap()
    );
    assert_eq!(merge_layers(&profile, 4).unwrap(), profile);
    for wanted in [0, 5] {
        let error = merge_layers(&profile, wanted).unwrap_err().to_string();
        assert!(error.contains(&format!("4 layers cannot be merged to {wanted}")), "{error}");
    }
}

#[test]
fn files_of_one_run_and_the_same_layers_make_a_profile_together() {
    let (whole, _) = alike(4, 8);
    let merged = merge_layers(&whole, 2).unwrap();
    let part = |profile: &Profile, is_shared: bool| {
        let of = profile.measurements().iter();
        let of = of.filter(|one| (one.parallelism != Parallelism::Pipeline) == is_shared).cloned().collect();
        let (sizes, target) = (profile.layer_sizes().to_vec(), profile.target_batch_size());
        Partial::new(sizes, of, target, profile.schedule(), profile.microbatches()).unwrap()
    };
    for order in [[false, true], [true, false]] {
        assert_eq!(Partial::joined(order.map(|is_shared| part(&merged, is_shared))).unwrap(), merged);
    }
    // What two files have is there once.
    assert_eq!(Partial::joined([Partial::from(merged.clone()), part(&merged, true)]).unwrap(), merged);
    let scheduled = merged.clone().scheduled(Schedule::OneForwardOneBackward, 8).unwrap();
    let cases = [
        (vec![], "there is no measurement with pipeline parallelism"),
        (vec![part(&merged, true)], "there is no measurement with pipeline parallelism"),
        (vec![part(&whole, false), part(&merged, true)], "layer 0 is 1 of the model's in one and 2 in another"),
        (vec![part(&scheduled, false), part(&merged, true)], "schedule is 1f1b in one and gpipe in another"),
    ];
    for (parts, words) in cases {
        let error = Partial::joined(parts).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn runs_of_merged_layers_leave_them_whole() {
    let text = |sizes: Value, partition: Value, peaks: Value| {
        let run = json!({ "parallelism": "pipeline", "degree": 1, "batch_size": 8, "partition": partition, "peak_bytes": peaks });
        let file = json!({ "layers": 4, "layer_sizes": sizes, "target_batch_size": 16, "runs": [run] });
        let results = Results::from_json(file.to_string().as_bytes());
        results.and_then(|results| results.profile()).unwrap_err().to_string()
    };
    let cases = [
        (json!([1, 3]), json!([2, 2]), json!([5, 5]), "run 0: a part ends within merged layer 1, which stays whole"),
        (json!([1, 2]), json!([4]), json!([5]), "layer_sizes has 2 entries, the smallest 1, 3 together"),
        (json!([4, 0]), json!([4]), json!([5]), "the smallest 0, 4 together"),
        (json!([usize::MAX, 9]), json!([4]), json!([5]), "and all are its 4 layers"),
        (json!([1, 3]), json!([4]), json!([5]), "added_bytes of layer 1: one with the partition [1, 3] would"),
        (json!([1, 3]), json!([1, 3]), json!([5, 1_u64 << 63]), "run 0: a peak of 9223372036854775808 bytes is more"),
    ];
    for (sizes, partition, peaks, words) in cases {
        let error = text(sizes, partition, peaks);
        assert!(error.contains(words), "{error}");
    }
}

/// The profile of the file format's description, with something changed in it.
fn changed(change: impl FnOnce(&mut Value)) -> Result<Profile, PartitionError> {
    let measurement = |parallelism: &str, degree: u64, batch: u64| {
        let (isolated, added) = ([100 * batch, 90, 80], json!([null, 30, -5]));
        json!({
            "parallelism": parallelism, "degree": degree, "batch_size": batch,
            "isolated_bytes": isolated, "added_bytes": added,
        })
    };
    let mut file = json!({
        "layers": 3,
        "measurements": [
            measurement("pipeline", 1, 4), measurement("pipeline", 1, 2),
            measurement("data", 2, 4), measurement("tensor", 4, 2),
        ],
        "target_batch_size": 8,
        "schedule": "1f1b",
        "microbatches": 4,
    });
    change(&mut file);
    Profile::from_json(file.to_string().as_bytes())
}

#[test]
fn profiles_that_cannot_be_are_refused_in_words() {
    let profile = changed(|_| {}).unwrap();
    assert_eq!((profile.layers(), profile.schedule(), profile.microbatches()), (3, Schedule::OneForwardOneBackward, 4));
    assert_eq!(profile.measurements()[0].batch_size, 2);
    let defaults = changed(|file| {
        file.as_object_mut().unwrap().retain(|key, _| !["schedule", "microbatches"].contains(&key.as_str()));
    });
    assert_eq!(defaults.map(|profile| (profile.schedule(), profile.microbatches())).unwrap(), (Schedule::GPipe, 1));
    // What is there twice and the same, is there once; a degree of one is no sharing.
    let twice = changed(|file| {
        let mut again = file["measurements"][0].clone();
        again["parallelism"] = json!("tensor");
        file["measurements"].as_array_mut().unwrap().push(again);
    });
    assert_eq!(twice.unwrap(), profile);
    let cases: [(&str, Value, &str); 22] = [
        ("/layers", json!(0), "0 layers cannot be cut"),
        ("/layers", json!(5000), "5000 layers cannot be cut: 1 to 4096 can"),
        ("/layers", json!(4), "measurement 0: isolated_bytes has 3 entries and the profile 4 layers"),
        ("/layers", json!(-1), "this is no profile: invalid value: integer `-1`"),
        ("/measurements", json!([]), "0 measurements make no profile"),
        ("/measurements/0/parallelism", json!("expert"), "unknown variant `expert`, expected one of `pipeline`"),
        ("/measurements/0/degree", json!(2), "measurement 0: a degree of 2 is not possible with pipeline parallelism"),
        ("/measurements/2/degree", json!(3), "measurement 2: a degree of 3 is not possible with data parallelism"),
        ("/measurements/2/degree", json!(0), "a degree of 0 is not possible"),
        ("/measurements/2/degree", json!(1_u64 << 40), "a degree of 1099511627776 is not possible"),
        ("/measurements/0/batch_size", json!(0), "batch_size of a measurement is 0"),
        (
            "/measurements/0/batch_size",
            json!(2),
            "contradictory measurements: pipeline parallelism of degree 1 at batch size 2 is there twice, and layer 0 has isolated_bytes",
        ),
        ("/measurements/0/isolated_bytes", json!([1, 2]), "measurement 0: isolated_bytes has 2 entries"),
        (
            "/measurements/0/isolated_bytes/1",
            json!(0),
            "measurement 0, layer 1: isolated_bytes is 0, which cannot be measured",
        ),
        ("/measurements/0/isolated_bytes/1", json!(-4), "layer 1: isolated_bytes is -4"),
        ("/measurements/0/isolated_bytes/1", json!(1e300), "layer 1: isolated_bytes is 1000000"),
        ("/measurements/0/added_bytes/2", json!(null), "measurement 0, layer 2: added_bytes is null"),
        ("/measurements/0/added_bytes/2", json!("5"), "invalid type: string"),
        ("/target_batch_size", json!(0), "target_batch_size is 0"),
        ("/microbatches", json!(9), "a batch of 8 cannot be split into 9 micro-batches"),
        ("/schedule", json!("interleaved"), "unknown variant `interleaved`"),
        ("/measurements/0/degree", json!(1.5), "this is no profile: invalid type: floating point `1.5`"),
    ];
    for (at, value, words) in cases {
        let error = changed(|file| *file.pointer_mut(at).unwrap() = value.clone()).unwrap_err();
        assert!(chain(&error).contains(words), "{at} = {value}: {}", chain(&error));
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let error = chain(&changed(|file| file["layres"] = json!(3)).unwrap_err());
    assert!(error.contains("unknown field `layres`"), "{error}");
    let error = chain(&changed(|file| file["layer_sizes"] = json!([1, 0, 1])).unwrap_err());
    assert!(error.contains("layer_sizes has 3 entries for 3 layers, the smallest 0"), "{error}");
    let only_shared = |file: &mut Value| {
        file["measurements"].as_array_mut().unwrap().drain(..2);
    };
    assert!(chain(&changed(only_shared).unwrap_err()).contains("there is no measurement with pipeline parallelism"));
    for text in ["", "{", "[]", "{\"layers\":1}", "\u{0}", "{\"layers\":1e99}"] {
        assert!(Profile::from_json(text.as_bytes()).is_err(), "{text}");
        assert!(Results::from_json(text.as_bytes()).is_err(), "{text}");
    }
    let deep = "[".repeat(100_000);
    assert!(Profile::from_json(deep.as_bytes()).is_err());
}

#[test]
fn a_profile_by_which_layers_need_nothing_is_no_reason_to_put_them_together() {
    let profile = changed(|file| file["measurements"][0]["added_bytes"] = json!([0, -400, 0])).unwrap();
    let error = recommend(&profile, Mesh::new(1, 2).unwrap()).unwrap_err().to_string();
    assert!(error.contains("contradictory measurements: by them layers 0 to 1 need"), "{error}");
}

#[test]
fn a_hundred_and_twenty_eight_layers_on_a_thousand_gpus() {
    for (nodes, gpus) in [(128, 8), (64, 16), (32, 32)] {
        let (profile, _) = alike(128, 8);
        let mesh = Mesh::new(nodes, gpus).unwrap();
        let plan = recommend(&profile, mesh).unwrap();
        check(&plan, &profile, mesh);
        assert!(nodes < 128 || plan.stages.len() == 128);
    }
}
