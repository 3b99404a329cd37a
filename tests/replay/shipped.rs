//! Every shipped trace without a plan, beside PyTorch's expandable segments.

use stitchd::plan::Plan;
use stitchd::replay::{AutoOptions, PoolName, Setup, repeat};
use stitchd::trace::Trace;
use stitchd::units::Bytes;

use super::production::{TRACES, run, run_again, setup};
use super::trace;

/// The shipped traces beside [`TRACES`].
const OTHERS: [&str; 15] = [
    "varying",
    "models/bert-lengths",
    "models/convnext-sizes",
    "models/gpt-eval",
    "models/gpt2-large-adamw",
    "models/llama1b-selective",
    "models/llama7b-interleaved-full",
    "models/llama7b-lora",
    "models/llama7b-zero3",
    "models/llama8b-1f1b",
    "models/moe-top2",
    "models/opt3b-offload",
    "models/t5-large-targets",
    "models/unet-diffusion",
    "models/vit-l16",
];

/// Every shipped trace.
pub(super) fn all() -> impl Iterator<Item = &'static str> {
    TRACES.into_iter().chain(OTHERS)
}

/// No job reserves more than with expandable segments, or makes more than 1.5 times their calls at
/// first. From the fourth iteration on it makes one in a thousand requests at most, or fewer than those.
#[test]
fn no_plan_takes_no_more_than_expandable_segments() {
    let (mut sum, mut count) = (0.0, 0.0);
    for name in all() {
        let longer = repeat(&trace(name), 3);
        let [ours, expandable] =
            [PoolName::Stitchd, PoolName::Expandable].map(|pool| run(pool, &longer, None, &setup(false)));
        let first = [&ours, &expandable].map(|run| run.calls_by_iteration[0]);
        let [later, beside] = [&ours, &expandable].map(|run| run.calls_by_iteration[3..].iter().sum::<u64>());
        let efficiency = ours.efficiency();
        println!(
            "{name}: {:.2} %, {:.2} with expandable segments, calls {first:?} and {later} from the fourth iteration on",
            100.0 * efficiency,
            100.0 * expandable.efficiency()
        );
        assert!(ours.peak_reserved <= expandable.peak_reserved, "{name}");
        assert!(first[0] * 2 <= first[1] * 3, "{name}: {first:?}");
        // A later batch may be the largest so far, for which memory has to come.
        assert!(later * 1000 <= ours.served || later < beside, "{name}: {later}, {beside}");
        (sum, count) = (sum + efficiency, count + 1.0);
    }
    let mean = sum / count;
    println!("mean: {:.2} %", 100.0 * mean);
    assert!(mean >= 0.993, "{mean}");
}

/// A plan that is made while the job runs makes no job hold more than with expandable segments.
#[test]
fn auto_takes_no_more_than_expandable_segments() {
    let mut planned = 0;
    // With contexts to the end, and while it is recorded only.
    let [always, recorded] = [false, true].map(|contexts_end| AutoOptions { contexts_end, ..AutoOptions::default() });
    for name in all() {
        let longer = repeat(&trace(name), 2);
        let auto = run(PoolName::Stitchd, &longer, None, &Setup { auto: always, ..setup(true) });
        let without = run(PoolName::Stitchd, &longer, None, &Setup { auto: recorded, ..setup(true) });
        let expandable = run(PoolName::Expandable, &longer, None, &setup(false));
        let installed = auto.more.auto.as_ref().map_or(0, |auto| auto.installed);
        let efficiencies = [&auto, &without].map(|run| format!("{:.2} %", 100.0 * run.efficiency()));
        println!("{name}: {efficiencies:?}, {installed} plans");
        planned += u32::from(installed > 0);
        assert!(auto.peak_reserved.max(without.peak_reserved) <= expandable.peak_reserved, "{name}");
    }
    // Of the other six no two iterations ask for the same, or one pair by chance.
    assert_eq!(planned, 14);
}

/// A later run finds the plan of the first when its first iteration is over, and goes by it from then on.
#[test]
fn a_later_run_goes_by_the_plan_of_the_first_from_its_second_iteration_on() {
    let auto = AutoOptions { contexts_end: true, ..AutoOptions::default() };
    let (mut from_second, mut planned) = (0, 0);
    for name in all() {
        let longer = repeat(&trace(name), 2);
        let again = run_again(&longer, &Setup { auto, ..setup(true) });
        let [none, expandable] =
            [PoolName::Stitchd, PoolName::Expandable].map(|pool| run(pool, &longer, None, &setup(false)));
        let plans = again.more.auto.as_ref().unwrap();
        let of_none = again.peak_reserved.get() as f64 / none.peak_reserved.get() as f64;
        println!("{name}: {of_none:.4} of no plan, {plans:?}");
        planned += u32::from(plans.installed > 0);
        from_second += u32::from(plans.from_iteration == Some(1));
        assert!(again.peak_reserved <= expandable.peak_reserved, "{name}");
        assert!(of_none <= 1.0025, "{name}: {of_none}");
    }
    // That of moe-top2 needs more than its second iteration.
    assert_eq!((planned, from_second), (14, 13));
}

/// The smallest device on which a job runs, by its peak live bytes: not below this, and at most a
/// 16th of `WORST - 1` less. Nothing where it does not run on one of `WORST` times the peak.
fn smallest_device(trace: &Trace) -> Option<f64> {
    let peak = trace.summary().peak_live.get() as f64;
    let runs_on = |part: u32| {
        let capacity = Some(Bytes::new((peak * device(part)) as u64));
        run(PoolName::Stitchd, trace, None, &Setup { capacity, ..setup(false) }).out_of_memory.is_none()
    };
    let (mut low, mut high) = (0, PARTS);
    if !runs_on(high) {
        return None;
    }
    while high - low > 1 {
        let middle = low.midpoint(high);
        if runs_on(middle) { high = middle } else { low = middle }
    }
    Some(device(high))
}

const WORST: f64 = 1.006;
const PARTS: u32 = 16;

/// So many parts of the way to the worst.
fn device(parts: u32) -> f64 {
    1.0 + (WORST - 1.0) * f64::from(parts) / f64::from(PARTS)
}

/// Where memory ends chunks are small, so that little of it lies unused beside what is live.
#[test]
fn the_smallest_device_without_a_plan_is_little_larger_than_the_peak() {
    let smallest = all().map(|name| {
        let device = smallest_device(&trace(name));
        println!("{name}: {device:?}");
        device.unwrap_or_else(|| panic!("{name} does not run on {WORST} times its peak"))
    });
    let smallest: Vec<f64> = smallest.collect();
    let mean = smallest.iter().sum::<f64>() / smallest.len() as f64;
    println!("mean: {mean:.4}");
    assert!(mean <= 1.003, "{mean}");
}

/// Every plan ends within two thousandths of the bound below which none can.
#[test]
fn every_plan_is_near_its_bound() {
    for name in all() {
        let plan = Plan::from_trace(&trace(name), 1).unwrap();
        println!("{name}: {:.4} % above the bound", 100.0 * plan.gap());
        assert!(plan.gap() <= 0.002, "{name}: {}", plan.gap());
    }
}
