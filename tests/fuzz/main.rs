//! Every reader of outside bytes on inputs that are right, nearly right and wrong: a few thousand of each, the same in every run. The same targets run
//! under AFL for as long as one likes; the README beside this says how.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod allocations;
mod bombs;
mod mutate;
mod targets;

use std::io::Read as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use allocations::{Counting, peak_of};
use stitchd::rng::Rng;
use stitchd::trace::{binary, import};
use targets::Target;

#[global_allocator]
static COUNTING: Counting = Counting;

const SEED: u64 = 0xf022;
const MUTATIONS: u64 = 4_000;

/// What any input may cost, and what each of its bytes may: an event of a trace takes ten times its row, and a packet has a buffer of its own.
const MEMORY: usize = 4 << 20;
const MEMORY_PER_BYTE: usize = 256;

/// The same for a reader whose event can be one byte: an event takes ninety, the list of events up to three times that while it grows, and the trace is read more than once.
const MEMORY_PER_CODE: usize = 1_500;

/// A reader of short things would say nothing with `input` in a message of its own; a failing input is shown as a program would write it.
fn check(target: &Target, input: &[u8]) {
    let outcome = catch_unwind(AssertUnwindSafe(|| peak_of(|| (target.run)(input))));
    let shown = || input[..input.len().min(2_000)].escape_ascii().to_string();
    let Ok(((), peak)) = outcome else { panic!("{} fails on b\"{}\"", target.name, shown()) };
    let per_byte = if target.name == "binary" { MEMORY_PER_CODE } else { MEMORY_PER_BYTE };
    let most = MEMORY + per_byte * input.len();
    assert!(peak <= most, "{} takes {peak} bytes for {} of b\"{}\"", target.name, input.len(), shown());
}

fn run(name: &str) {
    let target = targets::ALL.iter().find(|target| target.name == name).unwrap();
    let seeds = (target.seeds)();
    seeds.iter().for_each(|seed| check(target, seed));
    let mut rng = Rng::new(SEED);
    for _ in 0..MUTATIONS {
        check(target, &mutate::mutated(&mut rng, &seeds));
    }
}

#[test]
fn traces_are_read_or_refused() {
    run("trace");
}

#[test]
fn snapshots_are_read_or_refused() {
    run("snapshot");
}

#[test]
fn binary_traces_are_read_or_refused() {
    run("binary");
}

#[test]
fn logs_of_rmm_are_read_or_refused() {
    run("rmm");
}

#[test]
fn problems_are_read_or_refused() {
    run("problem");
}

#[test]
fn plans_are_read_or_refused() {
    run("plan");
}

#[test]
fn graphs_are_read_or_refused() {
    run("graph");
}

#[test]
fn models_of_onnx_are_read_or_refused() {
    run("onnx");
}

#[test]
fn profiles_are_read_or_refused() {
    run("profile");
}

#[test]
fn results_of_runs_are_read_or_refused() {
    run("results");
}

#[test]
fn configurations_are_read_or_refused() {
    run("config");
}

#[test]
fn packets_of_a_client_are_read_or_refused() {
    run("client-packet");
}

#[test]
fn packets_of_a_daemon_are_read_or_refused() {
    run("daemon-packet");
}

#[test]
fn messages_of_grpc_are_read_or_refused() {
    run("grpc");
}

#[test]
fn journals_are_read_or_refused() {
    run("journal");
}

#[test]
fn stats_pages_are_taken_or_refused() {
    run("stats-page");
}

#[test]
fn words_of_people_are_read_or_refused() {
    run("words");
}

/// What the reader of a compressed file takes at most, whatever is in it.
fn bound(packed: usize) -> usize {
    (640 << 20) + (8 << 10) * packed
}

/// A file of a header and then one row again and again, packed.
fn bomb(header: &[u8], row: &[u8]) -> Vec<u8> {
    let rows = row.repeat(1 << 20);
    let text = (0..64).fold(Box::new(header) as Box<dyn std::io::Read>, |text, _| Box::new(text.chain(&rows[..])));
    let bomb = zstd::encode_all(text, 1).unwrap();
    assert!(bomb.len() < 200_000, "{} bytes", bomb.len());
    bomb
}

#[test]
fn a_small_file_that_grows_without_end_is_refused_before_it_fills_the_memory() {
    let cases: [(&[u8], &[u8]); 3] = [
        (b"tick,event,id,bytes\n", b"1,mark,,\n"),
        (b"Thread,Time,Action,Pointer,Size,Stream\n", b"1,,allocate,a0,1,0\n"),
        (b"Thread,Time,Action,Pointer,Size,Stream\n", b"1,,allocate failure,0,1,0\n"),
    ];
    for (header, row) in cases {
        let bomb = bomb(header, row);
        let (trace, peak) = peak_of(|| import::read(&bomb[..]));
        assert!(trace.unwrap_err().to_string().starts_with("cannot read line"));
        assert!(peak < bound(bomb.len()), "{peak} bytes");
    }
}

#[test]
fn packed_pickles_stay_within_their_bound() {
    // Bytes that cannot be packed buy room for those that can.
    let mut rng = Rng::new(SEED);
    let noise: Vec<u8> = (0..100_000).map(|_| rng.next_u64() as u8).collect();
    // Within what a file may grow to, and far beyond.
    for (noise, len) in [(&noise[..0], 900 << 10), (&noise[..], 4 << 20), (&noise[..], 24 << 20)] {
        let text = [b"B", &(noise.len() as u32).to_le_bytes()[..], noise, b"0"].concat();
        for (name, start, code) in bombs::shapes() {
            let pickle = [b"\x80\x04", &text[..], start, &code.repeat(len / code.len())].concat();
            let packed = zstd::encode_all(&pickle[..], 3).unwrap();
            let (read, peak) = peak_of(|| import::read(&packed[..]));
            let error = stitchd::error::chain(&read.unwrap_err());
            assert_eq!(error.contains("it grows to more than"), len == 24 << 20, "{name}: {error}");
            println!("{name}: {peak} bytes of memory for {} that unpack to {}", packed.len(), pickle.len());
            assert!(peak < bound(packed.len()), "{name}: {peak} bytes of memory for {}", packed.len());
        }
    }
}

#[test]
fn a_binary_trace_that_grows_without_end_is_refused_before_it_fills_the_memory() {
    // A mark, and then marks as foretold: one byte each. In the second file a name that cannot be packed buys room for them.
    let mut rng = Rng::new(SEED);
    let name: Vec<u8> = (0..48_000).map(|_| b'0' + rng.below(64) as u8).collect();
    let name = [&[2, 0x80, 0xf7, 2][..], &name].concat();
    for first in [&name[..0], &name] {
        let mut file = [&binary::MAGIC[..], &binary::VERSION.to_le_bytes()].concat();
        // Four of them are told, until the book foretells.
        seal(&mut file, 0, &[first, &[1, 0x66, 3, 3, 3], &[0; 1 << 20]].concat());
        for block in 1..64 {
            seal(&mut file, block, &[0; 1 << 20]);
        }
        let bomb = zstd::encode_all(&file[..], 1).unwrap();
        assert!(bomb.len() < 60_000, "{} bytes", bomb.len());
        let (trace, peak) = peak_of(|| import::read(&bomb[..]));
        let error = stitchd::error::chain(&trace.unwrap_err());
        assert!(error.contains("it grows to more than"), "{error}");
        println!("{peak} bytes of memory for {}", bomb.len());
        assert!(peak < bound(bomb.len()), "{peak} bytes");
    }
}

/// Adds a block of events with the right checksum.
fn seal(file: &mut Vec<u8>, block: u64, codes: &[u8]) {
    let sealed = [&[1][..], &(codes.len() as u32).to_le_bytes(), codes].concat();
    let checksum = crc32fast::hash(&[&block.to_le_bytes()[..], &sealed].concat());
    file.extend(sealed);
    file.extend(checksum.to_le_bytes());
}

#[test]
fn no_pickle_takes_memory_out_of_proportion_to_its_length() {
    for (name, bomb) in bombs::pickles() {
        let (read, peak) = peak_of(|| stitchd::trace::import::snapshot::read(&bomb));
        let (times, outcome) = (peak as f64 / bomb.len() as f64, read.map(|imported| imported.trace.events.len()));
        println!("{name}: {times:.0} bytes for each of {}, and then {outcome:?}", bomb.len());
        assert!(times < 64.0, "{name}: {times:.0} bytes for each");
        assert_eq!(outcome.is_ok(), name.starts_with("events"), "{name}: {outcome:?}");
    }
}
