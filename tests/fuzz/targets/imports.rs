//! What is turned into traces: binary traces, logs of RMM, problems.

use stitchd::plan::solve::solve_with;
use stitchd::plan::{Problem, validate};
use stitchd::trace::import::Contents;
use stitchd::trace::{Trace, binary, csv, import};
use stitchd::work::Budget;

use super::trace::{gzip, zstd};

/// Whatever the bytes are; what was read writes in both forms and reads back as itself.
fn any(bytes: &[u8]) {
    let Ok(imported) = import::read(bytes) else { return };
    let trace = imported.trace;
    trace.breakdown();
    same(&trace, |bytes| binary::write(bytes, &trace));
    same(&trace, |bytes| csv::write(bytes, &trace));
}

fn same(trace: &Trace, write: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>) {
    let mut written = Vec::new();
    match write(&mut written) {
        Ok(()) => {}
        // Names longer than any, which only a CSV may have.
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => return,
        Err(error) => panic!("{error}"),
    }
    let again = import::read(&written[..]).expect("a trace that was written reads").trace;
    assert!(again.modules == trace.modules && again.events == trace.events);
}

/// Few changes survive the checksums: the input is also read as the codes of a block that has the right ones.
pub(crate) fn binary(bytes: &[u8]) {
    any(bytes);
    any(&sealed(bytes));
}

fn sealed(codes: &[u8]) -> Vec<u8> {
    let mut file = [&binary::MAGIC[..], &binary::VERSION.to_le_bytes()].concat();
    for (block, (kind, bytes)) in [(1, codes), (2, &[0, 0])].into_iter().enumerate() {
        let mut sealed = vec![kind];
        sealed.extend((bytes.len() as u32).to_le_bytes());
        sealed.extend_from_slice(bytes);
        let checksum = crc32fast::hash(&[&(block as u64).to_le_bytes()[..], &sealed].concat());
        file.extend(sealed);
        file.extend(checksum.to_le_bytes());
    }
    file
}

pub(crate) fn binaries() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for text in super::trace::seeds() {
        let Ok(trace) = csv::read(&text[..]) else { continue };
        let mut bytes = Vec::new();
        binary::write(&mut bytes, &trace).expect("memory takes anything");
        seeds.push(zstd(&bytes));
        // The codes of its one block, which [`sealed`] puts another around.
        seeds.push(bytes.get(13..bytes.len().saturating_sub(15)).unwrap_or_default().to_vec());
        seeds.push(bytes);
    }
    seeds.push(vec![1, 0x60, 5, 0, 0, 0, 2, 1, b'a', 1, 1, 0x20, 0, 1]);
    seeds
}

pub(crate) fn rmm(bytes: &[u8]) {
    any(bytes);
    any(&[RMM, bytes].concat());
}

const RMM: &[u8] = b"Thread,Time,Action,Pointer,Size,Stream\n";

pub(crate) fn rmm_logs() -> Vec<Vec<u8>> {
    let log: &[u8] =
        b"7,10:52:35.123456,allocate,0x7f8a40000000,1024,0x0\n9,1,allocate,7F8A40000400,2048,7f8a38001020\n\
        7,,free,0x7f8a40000000,1024,0\n7,,free,0x7f8a50000000,4096,0\n9,,allocate failure,(nil),999999,2\n\
        9,,allocate,7f8a40000400,5,0\n9,,free,7f8a40000400,5,0\n9,,free,7f8a40000400,5,0\n";
    vec![log.to_vec(), [RMM, log].concat(), gzip(&[RMM, log].concat()), RMM.to_vec()]
}

pub(crate) fn problem(bytes: &[u8]) {
    any(bytes);
    let rows = [PROBLEM, bytes].concat();
    any(&rows);
    // Whatever is asked for has an answer that is right, or none.
    if let Ok(Contents::Problem(rows)) = import::read_contents(&rows[..])
        && let Ok((problem, _)) = Problem::from_rows(&rows)
        && let Ok(solution) = solve_with(&problem, &Budget::of(100))
    {
        validate::check_offsets(&problem.buffers, &solution.offsets).unwrap();
    }
}

const PROBLEM: &[u8] = b"id,lower,upper,size\n";

pub(crate) fn problems() -> Vec<Vec<u8>> {
    let rows: &[u8] = b"0,0,9,512\n1,2,5,1024\n2,5,7,4096\n3,5,6,0\nb4,8,18446744073709551615,9223372036854774271\n";
    let other: &[u8] = b"offset,size,upper,lower,id,colour\n0,4,2,0,9,red\n,8,5,2,3,\n";
    vec![rows.to_vec(), [PROBLEM, rows].concat(), other.to_vec(), zstd(other), PROBLEM.to_vec()]
}
