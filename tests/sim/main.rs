//! Deterministic simulation: daemons that follow one another, their keeper and their clients in one thread, with a virtual clock and a world that delays, loses and kills, from a seed.
//!
//! The steward, the ledger, the store, the journal with its file, the taking over and the keeper with its socket are those of the product, and so is what a client holds, says of it and makes of the answer; who sends what when is written here, by the rules of `daemon/reattach.rs` and `session/line.rs`. Nothing is timed, no other thread runs: a seed is a history.
//!
//! What always holds is looked at after every step: no memory is with two clients, by the inode that they have mapped; none that a client has mapped is leased to it twice. In the end, when all is delivered, daemon and clients say the same of what each has.
//!
//! `cargo test --test stitchd-sim -- --seed 7 --steps 10000` is one history, `--seeds 1000` are many; without either it is some. `--plant N` builds a mistake in, which has to be found.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails where it is, and says what it was about"
)]

mod client;
mod daemon;
mod world;

use std::process::ExitCode;

use world::{Plant, World};

/// What is asked for.
struct Args {
    first: u64,
    seeds: u64,
    steps: u64,
    plant: Option<Plant>,
}

fn args() -> Args {
    let mut args = Args { first: 1, seeds: 40, steps: 4_000, plant: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        match word.as_str() {
            "--seed" => (args.first, args.seeds) = (number(), 1),
            "--seeds" => args.seeds = number(),
            "--steps" => args.steps = number(),
            "--plant" => args.plant = Some(Plant::of(number())),
            // What the harness of other tests is told.
            _ => {}
        }
    }
    args
}

fn main() -> ExitCode {
    let args = args();
    if std::env::args().any(|word| word == "--list") {
        return ExitCode::SUCCESS;
    }
    let mut sum = world::Counts::default();
    for seed in args.first..args.first + args.seeds {
        let mut world = World::new(seed, args.plant);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..args.steps {
                world.step();
            }
            world.settle();
        }));
        if outcome.is_err() {
            println!("seed {seed} fails: cargo test --test stitchd-sim -- --seed {seed} --steps {}", args.steps);
            return ExitCode::FAILURE;
        }
        sum.add(&world.counts);
    }
    println!("{} seeds of {} steps: {sum:?}", args.seeds, args.steps);
    if args.plant.is_none() {
        assert!(
            sum.kills > 0
                && sum.takeovers > 0
                && sum.grants > 0
                && sum.registered > 0
                && sum.torn > 0
                && sum.published > 0
                && sum.attached > 0
                && sum.guaranteed > 0,
            "a history in which nothing happens shows nothing"
        );
        // Each mistake that is built in is found by some of the same seeds.
        if args.seeds >= 20 {
            for plant in Plant::ALL {
                std::panic::set_hook(Box::new(|_| {}));
                let finds = |seed: &u64| {
                    let mut world = World::new(*seed, Some(plant));
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        for _ in 0..args.steps {
                            world.step();
                        }
                        world.settle();
                    }))
                    .is_err()
                };
                let found = (args.first..args.first + args.seeds).find(finds);
                let _ = std::panic::take_hook();
                let found = found.unwrap_or_else(|| panic!("{plant:?} is not found"));
                println!("{plant:?} is found by seed {found}");
            }
        }
    }
    // As other tests say it, for whoever counts.
    println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
    ExitCode::SUCCESS
}
