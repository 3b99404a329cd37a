//! Changes to inputs, the same for the same seed: flipped bits, other bytes, cuts, repeats, splices of two inputs, and numbers at their edges.

use stitchd::rng::Rng;

/// Longer inputs than this are cut: a target is to be run often.
const LEN_MAX: usize = 128 << 10;

/// Numbers where readers go wrong, as text and as bytes.
const EDGES: [u64; 9] = [0, 1, 0x7f, 0xffff_ffff, 0x1_0000_0000, 1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX];

/// A new input made from `seeds`, of which there is at least one.
pub(crate) fn mutated(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[rng.index(seeds.len())].clone();
    for _ in 0..=rng.below(4) {
        change(rng, &mut bytes, seeds);
    }
    bytes.truncate(LEN_MAX);
    bytes
}

fn change(rng: &mut Rng, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
    let at = rng.index(bytes.len() + 1);
    let end = at + rng.index((bytes.len() - at).min(64) + 1);
    match rng.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
        1 if at < bytes.len() => bytes[at] = rng.next_u64() as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..end)),
        4 => {
            let repeated = bytes[at..end].repeat(1 + rng.index(8));
            bytes.splice(at..at, repeated);
        }
        5 => {
            let other = &seeds[rng.index(seeds.len())];
            let from = rng.index(other.len() + 1);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        6 => {
            let edge = EDGES[rng.index(EDGES.len())].to_string();
            // In place of a number, if one stands here.
            let digits = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            bytes.splice(at..at + digits, edge.into_bytes());
        }
        7 => {
            let edge = EDGES[rng.index(EDGES.len())].to_le_bytes();
            bytes.splice(at..end, edge);
        }
        _ => bytes.insert(at, [b',', b'\n', b'"', 0, 0x80, 0xff, b' ', b'='][rng.index(8)]),
    }
}
