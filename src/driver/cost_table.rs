//! What driver calls cost, as somebody has measured and published it: the simulated driver adds these up.
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
    };

    /// All of them.
    pub const ALL: [&'static CostTable; 3] = [&CostTable::A100, &CostTable::GMLAKE, &CostTable::FREE];

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
}

type Points = &'static [(Bytes, f64)];

/// What a table has for the calls that somebody has measured; export and import stand at the cost of a map, the others at nothing.
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
    fn a_table_has_a_name_of_its_own() {
        for table in CostTable::ALL {
            assert_eq!(CostTable::named(table.name).as_ref(), Some(table));
        }
        assert_eq!(CostTable::named("h200"), None, "nobody has measured one yet");
    }
}
