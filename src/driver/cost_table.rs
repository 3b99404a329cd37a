//! What driver calls cost, by published measurements: the simulated driver adds these up.
//!
//! Not for: measuring (`driver::costs`). Nothing here is this machine's.

use super::Call;
use crate::units::Bytes;

/// What one call costs, in modelled seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct CostTable {
    /// The name by which users choose it.
    pub name: &'static str,
    /// Where the figures come from.
    pub source: &'static str,
    /// By call: sizes of chunk in ascending order, and seconds of one call on such a chunk.
    calls: [&'static [(Bytes, f64)]; Call::ALL.len()],
    /// Of cudaMalloc and cudaFree, by size.
    malloc: &'static [(Bytes, f64)],
    free: &'static [(Bytes, f64)],
    /// Of clearing a new chunk in a process of its own, before a session gets the chunk.
    clear: &'static [(Bytes, f64)],
}

const MIB: u64 = 1 << 20;

/// Seconds of one call, whatever the size.
const fn flat(micros: f64) -> [(Bytes, f64); 1] {
    [(Bytes::new(2 * MIB), micros * 1e-6)]
}

/// GMLake's Table 1 gives what it takes to fill 2 GiB with chunks of three sizes, in units of one cuMemAlloc of 2 GiB.
const fn gmlake([small, middle, large]: [f64; 3]) -> [(Bytes, f64); 3] {
    [
        (Bytes::new(2 * MIB), small * GMLAKE_UNIT / 1024.0),
        (Bytes::new(128 * MIB), middle * GMLAKE_UNIT / 16.0),
        (Bytes::new(1024 * MIB), large * GMLAKE_UNIT / 2.0),
    ]
}

/// Seconds of that cuMemAlloc. The paper does not say; its issue 22 does: 80 µs for mapping one chunk of 2 MiB and setting its access, which the
/// table has as (0.70 + 96.8) / 1024 units.
const GMLAKE_UNIT: f64 = 80e-6 * 1024.0 / (0.70 + 96.8);

impl CostTable {
    /// No call costs anything.
    pub const FREE: CostTable = CostTable {
        name: "free",
        source: "every call costs nothing",
        calls: [&[]; Call::ALL.len()],
        malloc: &[],
        free: &[],
        clear: &[],
    };

    /// One A100, 2 MiB chunks, one thread: reserve 19 µs, create 193 µs, map 1.45 µs, set access 36 µs, unmap 26 µs (kvcached,
    /// benchmarks/bench_vmm). Export and import stand at the cost of a map, release at that of an unmap, cudaMalloc and cudaFree at those of the calls that they stand for:
    /// nobody has published them. Other sizes cost the same: nobody has published those either.
    pub const A100: CostTable = CostTable {
        name: "a100",
        source: "kvcached, benchmarks/bench_vmm: A100, 2 MiB chunks",
        calls: calls(&flat(193.0), &flat(26.0), &flat(19.0), &flat(1.45), &flat(26.0), &flat(36.0)),
        malloc: &flat(193.0 + 19.0 + 1.45 + 36.0),
        free: &flat(26.0 + 26.0 + 19.0),
        clear: &[],
    };

    /// GMLake's Table 1 (A100, chunks of 2, 128 and 1024 MiB), whose unit is taken from its issue 22: see `GMLAKE_UNIT`. What the table lacks stands at the cost of a map;
    /// cudaMalloc and cudaFree are linear in the size.
    pub const GMLAKE: CostTable = CostTable {
        name: "gmlake",
        source: "GMLake (ASPLOS 2024), table 1: A100; unit from antgroup/glake issue 22",
        calls: calls(
            &gmlake([18.1, 0.89, 0.79]),
            &gmlake([0.70, 0.01, 0.002]),
            &gmlake([0.003, 0.003, 0.002]),
            &gmlake([0.70, 0.01, 0.002]),
            &gmlake([0.70, 0.01, 0.002]),
            &gmlake([96.8, 8.2, 0.7]),
        ),
        malloc: &[(Bytes::new(2 * MIB), GMLAKE_UNIT / 1024.0), (Bytes::new(2048 * MIB), GMLAKE_UNIT)],
        free: &[(Bytes::new(2 * MIB), GMLAKE_UNIT / 1024.0), (Bytes::new(2048 * MIB), GMLAKE_UNIT)],
        clear: &[],
    };

    /// One H200, driver 580.159, one thread, by `stitchd selftest --costs` (src/DESIGN.md, "What
    /// only hardware can answer"): create 14 µs, export 25, import 22 and 9 to close its
    /// descriptor, map 3, set access 27, unmap 17, and release 11 (2 MiB), 15 (16 MiB), 87
    /// (256 MiB), 336 (1 GiB). Reserving addresses was not measured and costs nothing here.
    ///
    /// Clearing is the sum of the calls of the helper process, which imports, maps, fills, unmaps
    /// and releases each chunk, and of the bytes at [`H200_FILL`]. cudaMalloc and cudaFree stand at
    /// the calls that they replace, and cudaMalloc reaches the measured 1.2 ms at 32 GiB.
    ///
    /// Compared with the device is the time for which a thread waits that requests new memory.
    /// Daemon, helper and client work one after the other, so that time is the sum of the calls.
    ///
    /// | growth | on the device | by this table |
    /// |---|---|---|
    /// | PyTorch's expandable segments, 20 MiB a handle | 2.8 ms a GiB | 2.25 |
    /// | release 9c968ab, chunks of 16 MiB | 8 to 13 ms a GiB | 12.2 |
    /// | 100 GiB in chunks of 32 MiB | 11.1 ms a GiB | 6.3 |
    ///
    /// The table says too little where it differs: 11 µs for each handle of PyTorch's, and 0.15 ms
    /// for each of the 3,200 chunks of the last row. No measured call accounts for either.
    pub const H200: CostTable = CostTable {
        name: "h200",
        source: "src/DESIGN.md: one H200, driver 580.159, selftest --costs; clearing counts",
        calls: passed_on(
            calls(&flat(14.0), &h200_release(0.0), &[], &flat(3.0), &flat(17.0), &flat(27.0)),
            &flat(25.0),
            &flat(22.0 + 9.0),
        ),
        malloc: &[(Bytes::new(2 * MIB), 44e-6), (Bytes::new(1024 * MIB), 44e-6), (Bytes::new(32 * 1024 * MIB), 1.2e-3)],
        free: &h200_release(17.0),
        clear: &[(Bytes::new(2 * MIB), h200_clear(2)), (Bytes::new(64 * 1024 * MIB), h200_clear(64 * 1024))],
    };

    /// All of them.
    pub const ALL: [&'static CostTable; 4] = [&CostTable::A100, &CostTable::GMLAKE, &CostTable::H200, &CostTable::FREE];

    /// The table called `name`.
    pub fn named(name: &str) -> Option<CostTable> {
        CostTable::ALL.into_iter().find(|table| table.name == name).cloned()
    }

    /// Modelled seconds of one call on a chunk of `len`.
    pub fn seconds(&self, call: Call, len: Bytes) -> f64 {
        at(self.calls[call.index()], len)
    }

    /// Modelled seconds of a cudaMalloc of `len`.
    pub fn malloc_seconds(&self, len: Bytes) -> f64 {
        at(self.malloc, len)
    }

    /// Modelled seconds of a cudaFree of `len`.
    pub fn free_seconds(&self, len: Bytes) -> f64 {
        at(self.free, len)
    }

    /// Modelled seconds in which a new chunk of `len` is cleared for the session that gets it.
    pub fn clear_seconds(&self, len: Bytes) -> f64 {
        at(self.clear, len)
    }
}

/// Bytes a second at which an H200 fills memory: three quarters of the 4.8 TB/s that its data sheet
/// states. Assumed, not measured; at 16 MiB it is a fortieth of what a chunk costs.
const H200_FILL: f64 = 0.75 * 4.8e12;

/// Seconds in which the helper process clears one chunk of `mib` MiB: import and close, map, set
/// access, unmap, release of an import (8 µs, whatever the size), and the bytes.
const fn h200_clear(mib: u64) -> f64 {
    (22.0 + 9.0 + 3.0 + 27.0 + 17.0 + 8.0) * 1e-6 + (mib * MIB) as f64 / H200_FILL
}

/// The release of a chunk's last handle, and `more` µs for the calls beside it.
const fn h200_release(more: f64) -> [(Bytes, f64); 4] {
    [
        (Bytes::new(2 * MIB), (11.0 + more) * 1e-6),
        (Bytes::new(16 * MIB), (15.0 + more) * 1e-6),
        (Bytes::new(256 * MIB), (87.0 + more) * 1e-6),
        (Bytes::new(1024 * MIB), (336.0 + more) * 1e-6),
    ]
}

type Points = &'static [(Bytes, f64)];

/// What a table has for the calls that were measured; export and import stand at the cost of a map,
/// the others at nothing.
const fn calls(
    create: Points,
    release: Points,
    reserve: Points,
    map: Points,
    unmap: Points,
    set_access: Points,
) -> [Points; Call::ALL.len()] {
    let mut calls: [Points; Call::ALL.len()] = [&[]; Call::ALL.len()];
    calls[Call::Create as usize] = create;
    calls[Call::Release as usize] = release;
    calls[Call::Reserve as usize] = reserve;
    calls[Call::Unreserve as usize] = reserve;
    calls[Call::Map as usize] = map;
    calls[Call::Unmap as usize] = unmap;
    calls[Call::SetAccess as usize] = set_access;
    calls[Call::Export as usize] = map;
    calls[Call::Import as usize] = map;
    calls
}

/// The same where export and import were measured, too.
const fn passed_on(mut calls: [Points; Call::ALL.len()], export: Points, import: Points) -> [Points; Call::ALL.len()] {
    calls[Call::Export as usize] = export;
    calls[Call::Import as usize] = import;
    calls
}

/// Linear between the points, flat beyond them.
fn at(points: Points, len: Bytes) -> f64 {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return 0.0 };
    let above = points.partition_point(|(size, _)| *size < len);
    match (above.checked_sub(1).and_then(|below| points.get(below)), points.get(above)) {
        (None, _) => first.1,
        (_, None) => last.1,
        (Some((from, low)), Some((to, high))) => {
            let share = (len - *from).get() as f64 / (*to - *from).get() as f64;
            low + (high - low) * share
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_those_that_were_published_and_between_them_on_a_line() {
        let micros = |table: &CostTable, call, mib| (table.seconds(call, Bytes::mib(mib)) * 1e8).round() / 100.0;
        assert_eq!(micros(&CostTable::A100, Call::Create, 2), 193.0);
        assert_eq!(micros(&CostTable::A100, Call::Create, 512), 193.0);
        let two = micros(&CostTable::GMLAKE, Call::SetAccess, 2) + micros(&CostTable::GMLAKE, Call::Map, 2);
        assert!((two - 80.0).abs() < 0.02, "{two}");
        let (small, middle) = (
            CostTable::GMLAKE.seconds(Call::Create, Bytes::mib(2)),
            CostTable::GMLAKE.seconds(Call::Create, Bytes::mib(128)),
        );
        assert_eq!(CostTable::GMLAKE.seconds(Call::Create, Bytes::mib(65)), (small + middle) / 2.0);
        assert_eq!(CostTable::FREE.seconds(Call::Create, Bytes::mib(2)), 0.0);
        assert!(
            CostTable::GMLAKE.malloc_seconds(Bytes::gib(2)) > 1000.0 * CostTable::GMLAKE.malloc_seconds(Bytes::mib(2))
        );
    }

    #[test]
    fn h200_has_the_figures_of_its_selftest() {
        let micros = |seconds: f64| (seconds * 1e7).round() / 10.0;
        let h200 = |call, mib| micros(CostTable::H200.seconds(call, Bytes::mib(mib)));
        let flat = [Call::Create, Call::Export, Call::Import, Call::Map, Call::SetAccess, Call::Unmap];
        for mib in [2, 16, 512] {
            assert_eq!(flat.map(|call| h200(call, mib)), [14.0, 25.0, 31.0, 3.0, 27.0, 17.0]);
        }
        assert_eq!([2, 16, 256, 1024].map(|mib| h200(Call::Release, mib)), [11.0, 15.0, 87.0, 336.0]);
        assert_eq!(h200(Call::Release, 640), 211.5, "half of the way from 256 MiB to 1 GiB");
        // The calls of the helper process are 86 µs; 16 MiB more are 4.7 at 3.6 TB/s.
        let clear = |mib| micros(CostTable::H200.clear_seconds(Bytes::mib(mib)));
        assert_eq!((clear(2), clear(16), clear(1024)), (86.6, 90.7, 384.3));
        assert_eq!(micros(CostTable::H200.malloc_seconds(Bytes::gib(32))), 1200.0);
        assert_eq!(micros(CostTable::H200.free_seconds(Bytes::mib(2))), 28.0);
        assert_eq!(CostTable::A100.clear_seconds(Bytes::mib(2)), 0.0);
    }

    #[test]
    fn a_table_has_a_name_of_its_own() {
        for table in CostTable::ALL {
            assert_eq!(CostTable::named(table.name).as_ref(), Some(table));
        }
        assert_eq!(CostTable::named("b300"), None, "there is no table of one");
    }
}
