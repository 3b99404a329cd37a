//! What a reader of a replay is told beside the figures, a sentence each.

use super::super::plan::{about_one_pass, differences, made_from};
use super::choice::serves_from_plan;
use super::{ReplayArgs, Result, show};
use crate::error::excerpt;
use crate::plan::{Plan, Problem, lower_bound};
use crate::replay::allocator::AutoPlans;
use crate::replay::models::caching::Conf;
use crate::replay::script::Script;
use crate::replay::{Job, PoolName, Setup};
use crate::trace::Trace;
use crate::trace::import::snapshot::AllocatorSettings;
use crate::units::counted;

/// So many settings of a snapshot that are not followed are named: it may have any number.
const REFUSED_SHOWN: usize = 5;

/// So much of their text is shown.
const SETTINGS_SHOWN: usize = 400;

/// Sets the models of PyTorch's allocator as it was set where the snapshot was taken. Returns a note
/// for each difference from the defaults.
pub(super) fn follow(settings: &AllocatorSettings, conf: &mut Conf) -> Vec<String> {
    let mut notes = Vec::new();
    if settings.expandable_segments {
        notes.push("the job that was recorded had expandable segments".to_owned());
    }
    // What the environment said, and over it what the allocator made of that.
    let (mut options, made) = (settings.text.clone(), settings.options());
    if options.is_empty() {
        options = made;
    } else if !made.is_empty() && !options.split(',').any(|option| option == made) {
        options = format!("{options},{made}");
    }
    let before = conf.clone();
    let (followed, refused) = before.clone().and_what_it_knows(&options);
    *conf = Conf { expandable_segments: before.expandable_segments, ..followed };
    if *conf != before {
        let options = excerpt(&options, SETTINGS_SHOWN);
        notes.push(format!(
            "caching and expandable are set as the recorded job had it: {options}; --conf sets them otherwise"
        ));
    }
    let not_followed = |error| format!("a setting of the recorded job is not followed: {error}");
    let more = refused.len().saturating_sub(REFUSED_SHOWN);
    notes.extend(refused.into_iter().take(REFUSED_SHOWN).map(not_followed));
    if more > 0 {
        notes.push(format!("{} more of the recorded job are not followed", counted(more as u64, "setting")));
    }
    notes
}

/// A plan that leaves more than this share of its pool idle at its peak gets a note.
const GAP_SAID: f64 = 0.05;

/// What the plan of this replay lacks, if a pool serves from it.
pub(super) fn about_plans(args: &ReplayArgs, pools: &[PoolName], plan: Option<&Plan>, profile: &Trace) -> Vec<String> {
    let mut notes = Vec::new();
    let serves = pools.iter().any(|pool| serves_from_plan(args, *pool));
    if let Some(plan) = plan.filter(|_| serves) {
        if plan.gap() > GAP_SAID {
            notes.push(format!(
                "the plan's pool has {}, {:.1} % more than is live at once by it: without a plan this job may \
                 take less",
                plan.pool_len,
                plan.gap() * 100.0
            ));
        }
        let different = match differences(plan, profile) {
            Ok(wrong) => wrong.into_iter().next(),
            Err(error) => Some(error.to_string()),
        };
        notes.extend(different.map(|first| format!("the plan was not made for this job: {first}")));
    }
    let is_made_here = pools.contains(&PoolName::Stalloc) || (serves && args.plan.is_none());
    if is_made_here {
        notes.extend(about_its_one_pass(profile));
    }
    notes
}

fn about_its_one_pass(profile: &Trace) -> Option<String> {
    let problem = Some(profile).filter(|profile| profile.iterations() == 1)?;
    let problem = Problem::from_trace(problem, 0).ok()?;
    about_one_pass(profile, &problem, lower_bound(&problem))
}

/// What the plan of `stalloc` is made from, and whether the comparison is with a plan of ours.
pub(super) fn about_stalloc(args: &ReplayArgs, pools: &[PoolName], job: Job<'_>, setup: &Setup) -> String {
    let from = made_from(setup.stalloc_iteration(job.profile));
    let ours = match job.plan {
        None if !pools.contains(&PoolName::Stitchd) => "",
        None if args.disables("plan") => "; stitchd has none",
        None => "; stitchd has none (--plan-from-iteration gives it one)",
        Some(_) => "",
    };
    format!("stalloc serves from a plan of {from}{ours}")
}

/// What was asked for and does nothing here.
pub(super) fn about_options(args: &ReplayArgs, pools: &[PoolName], setup: &Setup) -> Vec<String> {
    let has = |pool| pools.contains(&pool);
    let has_ours = PoolName::OURS.into_iter().any(has);
    let serves = pools.iter().any(|pool| serves_from_plan(args, *pool));
    let has_torch = has(PoolName::Caching) || has(PoolName::Expandable);
    let set = args.set.iter().chain(&args.sweep);
    let of = |model: &'static str| set.clone().any(|set| set.trim_start().starts_with(model));
    let idle = [
        (!args.disable.is_empty() && !has_ours, "--disable", "stitchd"),
        (args.plan.is_some() && !serves, "--plan", "stitchd"),
        (args.auto && !has(PoolName::Stitchd), "--auto", "stitchd"),
        (of("stitchd.") && !has_ours, "a setting stitchd.…", "stitchd"),
        (of("gmlake.") && !has(PoolName::Gmlake), "a setting gmlake.…", "gmlake"),
        (of("caching.") && !has_torch, "a setting caching.…", "caching or expandable"),
        (args.conf.is_some() && !has_torch, "--conf", "caching or expandable"),
    ];
    let idle = idle.into_iter().filter(|(is_idle, ..)| *is_idle);
    let mut notes: Vec<String> =
        idle.map(|(_, what, pool)| format!("{what} changes nothing in a replay without {pool}")).collect();
    if !has_torch {
        return notes;
    }
    if args.conf.as_deref().is_some_and(|conf| conf.contains("expandable_segments:"))
        || of("caching.expandable_segments=")
    {
        notes.push("expandable_segments is what tells caching and expandable apart: --pool chooses".to_owned());
    }
    let conf = &setup.conf;
    let collects = conf.garbage_collection_threshold > 0.0 || of("caching.garbage_collection_threshold=");
    if collects && conf.memory_fraction.is_none_or(|share| share >= 1.0) {
        let text = "garbage_collection_threshold does nothing without a limit: per_process_memory_fraction below \
                    1, which there is from PyTorch 2.10 on";
        notes.push(text.to_owned());
    }
    let wants_capacity = conf.memory_fraction.is_some() || conf.garbage_collection_threshold > 0.0;
    if wants_capacity && setup.capacity.is_none() && !args.min_capacity && !of("capacity=") {
        notes.push("shares of the device's memory mean nothing without --capacity".to_owned());
    }
    notes
}

/// What one pool's result has to say beside its figures.
pub(super) fn about_result(result: &Result, script: &Script) -> Vec<String> {
    let (name, more) = (result.pool.as_str(), &result.done.run.more);
    let mut notes = Vec::new();
    if more.deviations > 0 {
        let of = counted(script.requests, "request");
        let deviations = counted(more.deviations, "deviation");
        notes.push(format!("{name}: {deviations} from the plan: of {of} some had no place, or places no request"));
    }
    notes.extend(more.auto.and_then(|auto| about_auto(result, &auto)).map(|note| format!("{name}: {note}")));
    notes.extend(result.done.note.iter().map(|note| format!("{name}: {note}")));
    if let Some(Some(least)) = &result.least
        && let Some(note) = &least.done.note
    {
        let capacity = show::at_least(least.capacity);
        notes.push(format!("{name} needs {capacity} because in that {note}"));
    }
    notes
}

/// What came of plans that were made while the job ran. Nothing where there were none and another note says why.
fn about_auto(result: &Result, auto: &AutoPlans) -> Option<String> {
    let Some(from) = auto.from_iteration else {
        let (made, refused) = (counted(auto.made, "plan"), auto.refused);
        let is_said = result.done.note.is_some();
        return (!is_said).then(|| format!("it ran without a plan: {made} made while it ran, {refused} refused"));
    };
    let held = show::at_least(auto.peak_held);
    let given_back = if auto.peak_held < result.done.run.peak_reserved {
        "; what it gave back is the daemon's, and counts as reserved"
    } else {
        ""
    };
    Some(format!("by its own plan from iteration {from} on, the job has held at most {held} since{given_back}"))
}
