//! Who plays: training jobs by their traces, which are part of this binary, and what is known of each while it runs.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use crate::clock::{Clock as _, SystemClock};
use crate::ids::PlanId;
use crate::plan::{Plan, format};
use crate::units::Bytes;

/// The pretended device: room for the first three, and not for the fourth beside them while they keep
/// what lies idle.
pub(super) const DEVICE: Bytes = Bytes::gib(112);

/// A training job.
#[derive(Debug)]
pub(super) struct Role {
    pub(super) name: &'static str,
    /// The trace's name, as its documentation calls it.
    pub(super) trace: &'static str,
    bytes: &'static [u8],
    /// It starts when the others have taken their memory, and has to wait.
    pub(super) is_late: bool,
    /// It is killed half way.
    pub(super) is_victim: bool,
}

/// Three at once, and one more for what the victim leaves behind. Where they come from: tests/data/README.md.
pub(super) const CAST: [Role; 4] = [
    Role {
        name: "moe",
        trace: "qwen-moe-V-last",
        bytes: include_bytes!("../../../tests/data/qwen-moe-V-last.csv.zst"),
        is_late: false,
        is_victim: false,
    },
    Role {
        name: "gpt2-pipeline",
        trace: "gpt2-345m-VR",
        bytes: include_bytes!("../../../tests/data/gpt2-345m-VR.csv.zst"),
        is_late: false,
        is_victim: false,
    },
    Role {
        name: "gpt2-medium",
        trace: "gpt2-medium-hf",
        bytes: include_bytes!("../../../tests/data/gpt2-medium-hf.csv.zst"),
        is_late: false,
        is_victim: true,
    },
    Role {
        name: "resnet50",
        trace: "resnet50-olla",
        bytes: include_bytes!("../../../tests/data/resnet50-olla.csv.zst"),
        is_late: true,
        is_victim: false,
    },
];

/// A role with its plan, and what it has said of itself.
#[derive(Debug)]
pub(super) struct Act {
    pub(super) role: &'static Role,
    pub(super) trace_file: PathBuf,
    pub(super) plan_file: PathBuf,
    pub(super) plan: PlanId,
    pub(super) plan_bytes: Vec<u8>,
    pub(super) pool_len: Bytes,
    pub(super) lower_bound: Bytes,
    pub(super) planned_requests: usize,
    pub(super) plan_seconds: f64,
    pub(super) was_killed: bool,
    /// The most that progress has shown, for one that never reports.
    pub(super) seen_live: Bytes,
    pub(super) seen_leased: Bytes,
    pub(super) report: Option<Value>,
}

impl Act {
    /// Writes the trace to `directory` and makes its plan, as `stitchd plan` would.
    pub(super) fn prepare(role: &'static Role, directory: &Path) -> anyhow::Result<Act> {
        let trace_file = directory.join(format!("{}.csv.zst", role.trace));
        let plan_file = directory.join(format!("{}.plan", role.trace));
        std::fs::write(&trace_file, role.bytes).context("writing a trace")?;
        let trace = crate::trace::csv::read(role.bytes).context("reading a trace")?;
        let clock = SystemClock::new();
        let plan = Plan::from_trace(&trace, 1).context("planning")?;
        let plan_seconds = clock.now().as_secs_f64();
        let plan_bytes = format::write(&plan);
        std::fs::write(&plan_file, &plan_bytes).context("writing a plan")?;
        Ok(Act {
            role,
            trace_file,
            plan_file,
            plan: plan.id(),
            plan_bytes,
            pool_len: plan.pool_len,
            lower_bound: plan.provenance.lower_bound,
            planned_requests: plan.entries.len(),
            plan_seconds,
            was_killed: false,
            seen_live: Bytes::ZERO,
            seen_leased: Bytes::ZERO,
            report: None,
        })
    }

    fn reported(&self, key: &str) -> Bytes {
        Bytes::new(self.report.as_ref().and_then(|report| report.get(key)).and_then(Value::as_u64).unwrap_or(0))
    }

    pub(super) fn peak_live(&self) -> Bytes {
        self.reported("peak_live_bytes").max(self.seen_live)
    }

    pub(super) fn peak_leased(&self) -> Bytes {
        self.reported("peak_leased_bytes").max(self.seen_leased)
    }
}
