//! The models against what the real allocators do.

use stitchd::clock::SystemClock;
use stitchd::driver::Call;
use stitchd::driver::cost_table::CostTable;
use stitchd::replay::models::caching::{CachingAllocator, Conf, Version};
use stitchd::replay::models::gmlake::{Gmlake, GmlakeOptions, GmlakeRules, GmlakeStates};
use stitchd::replay::script::Script;
use stitchd::replay::{Perturbation, Run, Watch, repeat, run};
use stitchd::units::Bytes;

use crate::trace;

fn script(name: &str) -> Script {
    Script::of(&trace(name), 0)
}

fn caching(script: &Script, conf: &str, version: Version, capacity: Option<u64>) -> Run {
    let conf = Conf::parse(conf, version).unwrap();
    let mut model = CachingAllocator::new(conf, capacity.map(Bytes::new), &CostTable::A100);
    run(script, &mut model, Watch::default(), &SystemClock::new(), &|_| ())
}

/// What PyTorch's own allocator (libc10_cuda 2.5.1 on a stub of the CUDA runtime) reserves at its peak.
const PEAKS: [(&str, u64, u64); 5] = [
    ("gpt2-345m-VR", 18_498_977_792, 18_322_817_024),
    ("opt-13b-Z3-RO", 43_849_351_168, 37_213_962_240),
    ("qwen-moe-V-last", 62_981_668_864, 58_281_951_232),
    ("resnet50-olla", 26_724_007_936, 22_556_966_912),
    ("gpt2-medium-hf", 32_558_284_800, 31_392_268_288),
];

/// What is disturbed must show in what allocators make of it, not drown in memory that no job would need.
#[test]
fn a_disturbed_job_needs_about_what_it_needed() {
    let (mut least, mut most) = (f64::MAX, 0_f64);
    for (name, ..) in PEAKS {
        let trace = trace(name);
        let before = Script::of(&trace, 0);
        for (seed, from) in [(1, 0), (2, 0), (3, 0), (3, 2)] {
            let disturbed = stitchd::replay::perturb(&trace, &Perturbation::of_seed(seed), from);
            let after = Script::of(&disturbed, 0);
            let share = after.peak_live.get() as f64 / before.peak_live.get() as f64;
            println!("{name}, seed {seed} from {from}: {share:.3} of the peak before");
            (least, most) = (least.min(share), most.max(share));
            assert!(after.requests > before.requests, "no micro-batch, no evaluation");
        }
    }
    assert!(least > 0.98 && most < 1.3, "{least} to {most}");
}

#[test]
fn the_caching_models_reserve_what_pytorch_does() {
    let mut wrong = Vec::new();
    for (name, plain, expandable) in PEAKS {
        let script = script(name);
        for version in [Version(2, 5), Version::NEWEST] {
            for (conf, expected) in [("", plain), ("expandable_segments:True", expandable)] {
                let run = caching(&script, conf, version, None);
                if run.peak_reserved.get() != expected || run.served != script.requests {
                    wrong.push(format!("{name} {version} {conf:?}: {} and not {expected}", run.peak_reserved.get()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// With a capacity: requests served before it gave up, if it did, and peak reserved bytes.
const CAPACITIES: [(&str, u64, Option<u64>, u64); 15] = [
    ("gpt2-345m-VR", 18_127_781_888, Some(18_941), 17_425_235_968),
    ("gpt2-345m-VR", 17_572_036_608, Some(18_941), 17_425_235_968),
    ("gpt2-345m-VR", 16_647_192_576, Some(1_218), 16_349_396_992),
    ("opt-13b-Z3-RO", 42_970_644_480, None, 40_514_879_488),
    ("opt-13b-Z3-RO", 41_655_730_176, None, 40_514_879_488),
    ("opt-13b-Z3-RO", 39_464_206_336, Some(7_073), 37_258_002_432),
    ("qwen-moe-V-last", 61_721_280_512, Some(17_356), 58_000_932_864),
    ("qwen-moe-V-last", 59_831_746_560, Some(17_356), 58_000_932_864),
    ("qwen-moe-V-last", 56_681_824_256, Some(4_452), 53_018_099_712),
    ("resnet50-olla", 26_189_234_176, None, 25_883_049_984),
    ("resnet50-olla", 25_386_024_960, None, 25_180_504_064),
    ("resnet50-olla", 24_050_139_136, None, 23_821_549_568),
    ("gpt2-medium-hf", 31_906_070_528, Some(11_025), 30_912_020_480),
    ("gpt2-medium-hf", 30_928_797_696, Some(11_025), 30_912_020_480),
    ("gpt2-medium-hf", 29_301_407_744, Some(2_868), 29_265_756_160),
];

#[test]
fn the_caching_model_gives_up_where_pytorch_does() {
    let mut wrong = Vec::new();
    for (name, capacity, served, peak) in CAPACITIES {
        let script = script(name);
        let run = caching(&script, "", Version(2, 5), Some(capacity));
        let found = (run.out_of_memory.map(|_| run.served), run.peak_reserved.get());
        if found != (served, peak) {
            wrong.push(format!("{name} in {capacity}: {found:?} and not {:?}", (served, peak)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Under a capacity an expandable segment gives pages up and takes them again: the bar is that it finishes near the peak of what is live, at a price in calls.
#[test]
fn expandable_segments_finish_near_the_peak_and_pay_in_calls() {
    let mut pressed = 0;
    for (name, _, unlimited_peak) in PEAKS {
        let script = script(name);
        let capacity = script.peak_live.get() / 1000 * 1024;
        let run = caching(&script, "expandable_segments:True", Version::NEWEST, Some(capacity));
        println!("{name} in 1.024 times its peak: served {} of {}, {:?}", run.served, script.requests, run.calls);
        assert_eq!(run.out_of_memory, None, "{name}");
        assert!(run.peak_reserved.get() <= capacity);
        // With as many bytes as it likes it maps, and never unmaps.
        let unlimited = caching(&script, "expandable_segments:True", Version::NEWEST, None).calls;
        let is_pressed = unlimited_peak > capacity;
        assert_eq!((unlimited.of(Call::Unmap), run.calls.of(Call::Unmap) > 0), (0, is_pressed), "{name}");
        let pays = run.calls.total() > unlimited.total() && run.calls.seconds > unlimited.seconds;
        assert!(pays || !is_pressed, "{name}: {:?} and not more than {unlimited:?}", run.calls);
        pressed += u32::from(is_pressed);
    }
    assert!(pressed > 0);
}

/// Section 4.2.2: after a few iterations of a regular job only exact matches are left.
#[test]
fn gmlake_serves_a_regular_job_by_exact_matches_alone_from_the_fifth_iteration() {
    for name in ["resnet50-olla", "opt-13b-Z3-RO"] {
        let trace = trace(name);
        let after = |rules, times| -> (GmlakeStates, u64, u64) {
            let options = GmlakeOptions { rules, ..GmlakeOptions::default() };
            let mut model = Gmlake::new(options, None, &CostTable::A100);
            let script = Script::of(&repeat(&trace, times), 0);
            let run = run(&script, &mut model, Watch::default(), &SystemClock::new(), &|_| ());
            let events = run.calls.of(Call::Event);
            (model.states(), run.calls.total() - events, events)
        };
        // The trace has three iterations: with one more there are four.
        let (four, seven) = (after(GmlakeRules::Paper, 1), after(GmlakeRules::Paper, 4));
        assert_eq!((four.1, four.2), (seven.1, seven.2), "{name}");
        assert!(seven.0.exact > four.0.exact, "{name}");
        let others =
            |states: GmlakeStates| (states.single, states.multiple, states.insufficient, states.stitches_freed);
        assert_eq!(others(four.0), others(seven.0), "{name}");
        // The published code splits and merges all the time, which costs no call; what it frees costs an event each time.
        let (four, seven) = (after(GmlakeRules::Code, 1), after(GmlakeRules::Code, 4));
        assert_eq!(four.1, seven.1, "{name}");
        assert!(seven.2 > four.2, "{name}");
    }
}
