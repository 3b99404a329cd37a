//! Every reader of outside bytes on inputs that are right, nearly right and wrong: a few thousand of each, the same in every run. The same targets run
//! under AFL for as long as one likes; the README beside this says how.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails where it is")]

mod allocations;
mod mutate;
mod targets;

use std::io::Read as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use allocations::{Counting, peak_of};
use stitchd::rng::Rng;
use stitchd::trace::csv;
use targets::Target;

#[global_allocator]
static COUNTING: Counting = Counting;

const SEED: u64 = 0xf022;
const MUTATIONS: u64 = 4_000;

/// What any input may cost, and what each of its bytes may: an event of a trace takes ten times its row, and a packet has a buffer of its own.
const MEMORY: usize = 4 << 20;
const MEMORY_PER_BYTE: usize = 256;

/// A reader of short things would say nothing with `input` in a message of its own; a failing input is shown as a program would write it.
fn check(target: &Target, input: &[u8]) {
    let outcome = catch_unwind(AssertUnwindSafe(|| peak_of(|| (target.run)(input))));
    let shown = || input[..input.len().min(2_000)].escape_ascii().to_string();
    let Ok(((), peak)) = outcome else { panic!("{} fails on b\"{}\"", target.name, shown()) };
    let most = MEMORY + MEMORY_PER_BYTE * input.len();
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
fn plans_are_read_or_refused() {
    run("plan");
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
fn stats_pages_are_taken_or_refused() {
    run("stats-page");
}

#[test]
fn words_of_people_are_read_or_refused() {
    run("words");
}

#[test]
fn a_small_file_that_grows_without_end_is_refused_before_it_fills_the_memory() {
    const ROWS: &[u8] = b"1,mark,,\n";
    let header = b"tick,event,id,bytes\n";
    let rows = ROWS.repeat(1 << 20);
    let text = (0..64).fold(Box::new(&header[..]) as Box<dyn std::io::Read>, |text, _| Box::new(text.chain(&rows[..])));
    let bomb = zstd::encode_all(text, 1).unwrap();
    assert!(bomb.len() < 200_000, "{} bytes", bomb.len());
    let (trace, peak) = peak_of(|| csv::read(&bomb[..]));
    assert!(trace.unwrap_err().to_string().starts_with("cannot read line"));
    assert!(peak < 1 << 30, "{peak} bytes");
}
