//! From a plan to a planned pool: the plan is validated, and its entries are laid out so that a
//! request takes constant time.
//!
//! Not for: memory behind the addresses, which the runtime brings.

use std::ops::Range;

use super::detours::Detours;
use super::dynamic::Dynamic;
use super::flags::Flags;
use super::lanes::{Lanes, Progress};
use super::matcher::Matcher;
use super::places::{NO_KEY, Places};
use super::tenants::Tenants;
use super::{Planned, PlannedCounts, PlannedPool};
use crate::limits;
use crate::plan::validate::{self, Wrong};
use crate::plan::{Expiries, LanePlan, Plan};
use crate::units::{AddressSpan, Bytes, PlanOffset};

/// A plan that this pool cannot serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InstallError {
    /// The addresses are fewer than the plan needs.
    #[error("the plan needs {needed} and got {given}")]
    TooSmall {
        /// Bytes of the plan.
        needed: Bytes,
        /// Bytes of the addresses.
        given: Bytes,
    },
    /// The pool is larger than offsets of 32 bits reach, in units of allocation.
    #[error("a planned pool of {0} is too large")]
    TooLarge(Bytes),
    /// It contradicts itself.
    #[error("the plan contradicts itself")]
    Wrong(#[from] Wrong),
}

impl PlannedPool {
    /// Offsets are numbers of 32 bits, in units of allocation, and two of those stand for none.
    pub const LEN_MAX: Bytes = Bytes::new(NO_KEY as u64 * limits::ALLOCATION_ALIGNMENT.get());

    /// The pool of `plan` at `span`, which is mapped and stays so while the pool lives.
    pub fn new(plan: &Plan, span: AddressSpan) -> Result<PlannedPool, InstallError> {
        if plan.pool_len > span.len() {
            return Err(InstallError::TooSmall { needed: plan.pool_len, given: span.len() });
        }
        let unit = limits::ALLOCATION_ALIGNMENT.get();
        if plan.pool_len >= PlannedPool::LEN_MAX {
            return Err(InstallError::TooLarge(plan.pool_len));
        }
        validate::check(plan)?;
        let units = |offset: PlanOffset| (offset.get() / unit) as u32;
        let places = Places::new(plan.entries.iter().map(|entry| units(entry.offset)));
        let of_lanes = plan.lanes();
        let expiries = Expiries::of(&of_lanes);
        let nobody = plan.entries.len() as u32;
        let numbered = of_lanes.iter().zip(0..).flat_map(|(of, lane)| of.plan.entries.iter().map(move |of| (of, lane)));
        let entries = numbered
            .zip(0..)
            .map(|((entry, lane), at)| Planned {
                bytes: entry.bytes,
                context: entry.context,
                place: places.of(units(entry.offset)),
                lane,
                gone: expiries.before(at).first().map_or(nobody, |gone| *gone),
                has_more_gone: expiries.before(at).len() > 1,
            })
            .collect::<Box<[_]>>();
        let mut first = 0;
        let progress = |of: &LanePlan| {
            let of_lane = first..first + of.entries.len() as u32;
            first = of_lane.end;
            let cycle_start = of_lane.start + of.plan.cycle_start as u32;
            let number_at = |at: usize| of.entries.get(at).copied().unwrap_or(nobody);
            // What the entries of the only lane leave over, detours have.
            let part = Some(0..plan.pool_len.get()).filter(|_| of_lanes.len() == 1);
            let part = part.or_else(|| of.plan.part().map(|part| part.start().get()..part.end().get()));
            let part = part.unwrap_or(0..0);
            let begins = (number_at(0), number_at(of.plan.cycle_start));
            let matcher = Matcher::new(&entries, of_lane, cycle_start);
            (of.lane, Progress::new(matcher, Dynamic::new(of), part, begins))
        };
        let detours = Detours::of(&of_lanes);
        let lanes = Lanes::new(of_lanes.iter().map(progress));
        let of_detours = detours.spans().map(|(lane, span)| (span.start().get()..span.end().get(), lane));
        let parts = lanes.iter().zip(0..).map(|(lane, number)| (lane.part.clone(), number)).chain(of_detours);
        let parts = merged(parts.collect());
        Ok(PlannedPool {
            span,
            orderly: Flags::new(entries.len() + 1),
            expiries,
            places,
            tenants: Tenants::new(span.len()),
            lanes,
            parts,
            detours,
            entries,
            cells: None,
            counts: PlannedCounts::default(),
            passed_unserved: 0,
            unexpected: 0,
            says_dynamic: false,
            unserved_dynamic: None,
            expects_frees: false,
        })
    }
}

/// The same parts in order, those of one lane that meet put together.
fn merged(mut parts: Vec<(Range<u64>, u32)>) -> Box<[(Range<u64>, u32)]> {
    parts.retain(|(part, _)| !part.is_empty());
    parts.sort_by_key(|(part, _)| (part.start, part.end));
    parts.dedup_by(|(next, next_lane), (last, lane)| {
        let meets = lane == next_lane && next.start <= last.end;
        if meets {
            last.end = last.end.max(next.end);
        }
        meets
    });
    parts.into()
}
