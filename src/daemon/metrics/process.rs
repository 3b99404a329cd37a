//! The daemon's own process, by the names that every Prometheus client library uses for it.

use metrics::gauge;

use super::families::{self, Kind};
use crate::daemon::Daemon;

/// Writes what the recorder does not: its counters are whole, and a daemon that idles takes half an hour for a second.
pub(super) fn write(out: &mut String, own: Option<Stat>) {
    if let Some(own) = own {
        let seconds = own.cpu_ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        families::write_one(out, ("process_cpu_seconds_total", Kind::Counter), seconds);
    }
}

/// Records it; who counts its descriptors has walked a directory of them.
pub(super) fn record(open_fds: u64, own: Option<Stat>) {
    gauge!("process_open_fds").set(open_fds as f64);
    gauge!("process_max_fds").set(Daemon::open_fds_max() as f64);
    let Some(own) = own else { return };
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    gauge!("process_resident_memory_bytes").set(own.resident_pages as f64 * rustix::param::page_size() as f64);
    gauge!("process_virtual_memory_bytes").set(own.virtual_bytes as f64);
    gauge!("process_threads").set(own.threads as f64);
    if let Some(boot) = boot_time(&std::fs::read_to_string("/proc/stat").unwrap_or_default()) {
        gauge!("process_start_time_seconds").set(boot as f64 + own.start_ticks as f64 / ticks);
    }
}

/// What /proc/PID/stat says, as far as it is shown (proc_pid_stat(5)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stat {
    cpu_ticks: u64,
    threads: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    /// Of this process.
    pub(super) fn read() -> Option<Stat> {
        Stat::of(&std::fs::read_to_string("/proc/self/stat").unwrap_or_default())
    }

    fn of(text: &str) -> Option<Stat> {
        // The name before may hold anything.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        // The first behind the name is the third.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Stat {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// When the machine was started, in seconds since 1970.
fn boot_time(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_process_are_read_behind_its_name_whatever_that_is() {
        let text =
            "7 (a) b ( c) S 1 7 7 0 -1 4194560 9 0 0 0 25 17 0 0 20 0 4 0 12345 1048576 321 18446744073709551615 1 1";
        let stat = Stat { cpu_ticks: 42, threads: 4, start_ticks: 12_345, virtual_bytes: 1 << 20, resident_pages: 321 };
        assert_eq!(Stat::of(text), Some(stat));
        assert_eq!([Stat::of(""), Stat::of("7 (a) S 1")], [None, None]);
        assert_eq!((boot_time("cpu 1 2\nbtime 17\n"), boot_time("cpu 1")), (Some(17), None));
        assert!(Stat::read().unwrap().threads > 0);
    }
}
