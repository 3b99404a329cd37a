//! stitchd: the memory daemon for GPU nodes.
//!
//! One daemon per node owns the devices' physical memory. Training processes lease chunks of it over file descriptors, see them as contiguous
//! ("stitched") address ranges, and run their allocations inside those ranges without asking anyone.
//!
//! ```text
//!  training process                                          stitchd serve, one per node
//!  ┌───────────────────────────────────┐                     ┌───────────────────────────────────┐
//!  │ runtime, one per device           │   gRPC: sessions,   │ ledger: who holds which chunk     │
//!  │   planned pool   ← a plan         │   plans, status     │ store: the chunks' driver handles │
//!  │   page pool      ← all the rest   │◄───────────────────►│ registry: sessions and processes  │
//!  │                                   │                     │ plans, metrics, probes            │
//!  │ mappings ◄── chunks               │◄── fds, in batches ─│ chunk socket                      │
//!  │ stats page                        │──── shared page ───►│                                   │
//!  └───────────────────────────────────┘                     └───────────────────────────────────┘
//! ```
//!
//! The README says how to use it. `src/DESIGN.md` follows one allocation through all of this, and keeps decisions with what was rejected.
//!
//! # The code, in reading order
//!
//! | module | what it is for |
//! |---|---|
//! | [`units`], [`ids`], [`limits`], [`clock`], [`error`], [`rng`], [`ladder`], [`mod@sync`], `extents`, `lifetimes`, [`mortal`], [`work`] | the base: sizes and spans, names, every maximum, time, kinds of errors, seeded randomness, chunk sizes, where threads meet, free stretches, who comes and goes in time, moments at which a test kills, work that is counted |
//! | [`driver`] | what hardware can do: chunks, addresses, mappings, streams. The `host` and `sim` drivers, those of the GPU vendors over libraries that are found at run time, and decorators over any |
//! | [`memory`] | who owns what of it: `Chunk`, `Reservation`, `Mapping`, whole or not at all |
//! | [`store`] | every chunk of a daemon, its handle and its one exported descriptor |
//! | [`ledger`] | who holds what: a pure state machine, commands in, effects out; it can begin with what another has left ([`ledger::Facts`]) |
//! | [`journal`] | what a daemon has to know that follows one that was killed: facts in a file that is appended to, read no further than it is as it was written |
//! | [`steward`] | the ledger, the store and the journal, put together |
//! | `keeper` | the process that holds descriptors while no daemon does |
//! | [`trace`] | what a job did: allocations and frees in order |
//! | [`plan`] | from a trace to addresses, made ahead of time, and checked by somebody else |
//! | [`pool`] | which request gets which bytes: the planned pool and the page pool |
//! | [`context`] | where in its job a thread is |
//! | [`record`] | a trace of a running job: a tap in its runtime, and who makes events of what comes out |
//! | [`runtime`] | the pools of one device in one process, and the way to more memory |
//! | [`auto`] | plans made while the job runs, and when another is needed |
//! | [`wire`] | what goes between processes: messages, packets with descriptors, who is at the other end |
//! | [`session`] | the client's side of it |
//! | `order` | the order of a graph's operators that needs the least memory (OLLA) |
//! | `partition` | where to cut a model for pipelined training, and how to share each stage (CAPTURE) |
//! | `replay` | a trace through these pools, and through models of others |
//! | `daemon` | the daemon's side of it, metrics and probes |
//! | `cli` | one file per subcommand |
//!
//! The package `client` beside this one is the C border: `stitch_malloc`, `stitch_free`, and nothing of its own.
//!
//! # Architecture invariants
//!
//! Each is held by `tests/tidy` or by a type.
//!
//! 1. [`driver`] decides nothing. [`pool`] and [`plan`] decide, and touch a device only through [`memory`]; [`ledger`] touches nothing at all. So
//!    policy is tested without devices, and devices without policy.
//! 2. Only `daemon`, [`session`] and the packets of [`wire`] know tokio, threads or sockets, and [`work`] has a second thread that changes no answer. Everything else is synchronous and deterministic: same
//!    inputs, same seed, same result.
//! 3. Proto types are made and read in [`wire`], [`session`], `daemon` and `cli`; no other module knows them. A journal has messages of its own, which it shows to nobody.
//! 4. Addresses are numbers ([`units::DeviceAddress`]), not pointers, outside [`driver`] and the C border.
//! 5. No driver's name appears outside [`driver`], which also parses it from the configuration.
//! 6. No layer exports metrics. Layers return stats; `daemon/metrics.rs` is the only list of metric names.
//! 7. The environment and the wall clock are read in `main`, `cli`, `daemon/config.rs`, `session/locate.rs` and `clock.rs`, and nowhere else.
//! 8. A chunk is in exactly one state in the ledger at any time.
//! 9. `unsafe` stands in a short list of files, each with its reason in its first lines.
//!
//! # Glossary
//!
//! | word | meaning |
//! |---|---|
//! | device | one GPU, or the host that pretends to be one ([`ids::DeviceId`], [`ids::DeviceUuid`]) |
//! | granularity | the smallest size and alignment that a device can create ([`driver::Capabilities`]) |
//! | chunk | one physical piece made by the driver and owned by the daemon ([`memory::Chunk`]) |
//! | reservation | a range of addresses held in one process, nothing behind it yet ([`memory::Reservation`]) |
//! | mapping | chunks made visible at a reservation, with access ([`memory::Mapping`]) |
//! | span | a half-open interval of bytes; the only interval type ([`units::Span`]) |
//! | home, place | the one address of a chunk at which its free bytes are counted; addresses that show free bytes of several chunks side by side ([`pool::pages`]) |
//! | stitch, trim | make a place, give idle chunks back |
//! | lend | give the page pool a free part of a plan's pool (`runtime::plan_fallbacks`) |
//! | allocation | what a caller received: an address and a size |
//! | pool | the policy that serves allocations ([`pool`]) |
//! | idle, live | not in use, in use |
//! | session | one client process, from hello to end ([`session::Session`], [`ids::SessionId`]) |
//! | tenant | whose memory it is: a name of the configuration, a pod or a user; chunks never go from one session to another, whatever the tenant, but as a shared range |
//! | terms, limit, guarantee, priority | what a session may have: the most, what it is to have whenever it asks, its place among others ([`ledger::Terms`]) |
//! | need, admitted | what a job has in use between two iterations and at the peak of the next ([`runtime::Need`]); an iteration whose peak is guaranteed before it begins |
//! | to lend, borrower, withheld | unused guarantees go to others until they are asked for; who has some; those that are not lent, and kept |
//! | parked | idle in a process that still maps it |
//! | to ask back, question, answer | the daemon wants idle memory of a session because somebody waits ([`ledger::Effect::AskBack`]); the session has released what it will |
//! | dry, settled | a session that gave less than it was asked for; what a session got by asking others, which stays with it for a while |
//! | lease | the right of a session to chunks, until released or reclaimed |
//! | shared range, draft | chunks that several sessions hold under a name ([`ids::RangeId`]), and what is written before it is published ([`session::shared`]) |
//! | to publish, attach, detach, withdraw | to make leased chunks a shared range; to hold one, to hold it no more; to take its name away |
//! | holder, to bear, to linger | a session that holds a range; to have it counted against one's guarantee, which its publisher does; to outlive the last holder for a while |
//! | sealed | nobody can write it any more, by the driver's doing ([`driver::Driver::seal`]) |
//! | to sleep, to wake, tag | memory goes back and its addresses stay; it comes again ([`runtime::Runtime::sleep`]); what is put to sleep without the rest |
//! | release, reclaim | a session gives chunks back, the daemon takes them back after the session's end |
//! | quarantine | chunks and addresses whose return failed: counted, and not used again; a daemon asks again for its chunks ([`memory::Quarantine`]) |
//! | export, import | chunk to descriptor, descriptor to chunk |
//! | ticket | a one-time token that ties a connection of the chunk socket to what gRPC said ([`wire::convert::Token`]) |
//! | ledger | the record of who holds what ([`ledger::Ledger`]) |
//! | journal, step, record, book | what outlives a killed daemon; what is written at once; a fact that holds from then on; all facts that hold (`journal`) |
//! | keeper, witness | the process that holds descriptors while no daemon does (`keeper`); where the number of a journal's last step stands, which the keeper holds |
//! | to follow, to take over, to reattach, to register | a daemon comes after another in the same directory; has what that one had; a session is there again with what it holds; memory that a session has mapped and nobody knows of counts as its own |
//! | moment | a place between two things where a test has a process killed ([`mortal`]) |
//! | bare | a chunk that nobody can hand on: its descriptor is nowhere any more, or never was |
//! | torn, damaged | a journal that ends in the middle of a step that nobody was told of; one that has something in it that was not written there |
//! | trace, event, tick | a recorded sequence, one entry, its logical time ([`trace::Trace`], [`units::Tick`]) |
//! | context | where in its job a thread is: phase, micro-batch, chunk of the model, module ([`context`], [`trace::ContextKey`]) |
//! | recording, tap, sink | a trace of a running job, the runtime's end of it, where its events go ([`record`]) |
//! | remark | what a recording says of itself: what it lacks, what was made up ([`trace::binary::Remarks`]) |
//! | cut | where the last iteration of a trace ends in the middle, because memory ran out or the process ended ([`trace::Cut`]) |
//! | iteration, phase | one training step, a named part of it |
//! | computation phase | phase, micro-batch and chunk of the model together, by number: when a buffer comes and goes, coarsely ([`plan::PhasePair`]) |
//! | buffer | a request while it is planned: a size and a lifetime ([`plan::Buffer`]) |
//! | problem, plan | what is to be placed, and where it was placed ([`plan::Problem`], [`plan::Plan`]) |
//! | HomoPhase group, local plan, HomoSize group, memory layer | STAlloc's words: requests of the same computation phases, the block they make; blocks of one size, a row of them in time ([`plan::solve::Solver::Phased`]) |
//! | fingerprint, position | a hash of what a job asks for in its first iteration; which of its processes this is ([`plan::Fingerprint`], [`plan::Position`]) |
//! | lane, role | the requests of a plan that come in one order: those of a stream, or of each of the threads that race on it; which of those ([`plan::Lane`]) |
//! | prologue, cycle | the plan of what comes once, and of what every iteration repeats |
//! | kind, detour | iterations that do something else than the cycle; what comes there instead of a stretch of it, from which entry to which ([`plan::Kind`], [`plan::Detour`]) |
//! | operator, storage, order | what a graph runs; memory of one tensor or of several that are the same; the sequence in which operators run ([`order`]) |
//! | place, walk, width | which operators of a graph have run; on the way through it; so many places at each level of a search (`order::search`) |
//! | layer, stage, config, degree | what a model is cut between; layers on one GPU or on several that share them; in which way and among how many ([`partition`]) |
//! | mesh, profile, isolated and added bytes | nodes with GPUs; what layers were measured to need alone on a GPU, and beside those before them ([`partition::Profile`]) |
//! | peak, lower bound | the highest byte that is used, the largest sum of live sizes at any tick |
//! | static pool | the addresses of a plan and the memory behind them, reserved before the job or taken from what it had idle ([`pool::planned`]) |
//! | deviation | a request that the plan did not foresee, or one that it foresaw and that did not come ([`pool::planned::PlannedCounts`]) |
//! | dynamic, varies | a request whose size is another in each iteration ([`plan::DynamicEntry`]); where it may go in the static pool is its reusable space ([`plan::ReuseSpaces`]) |
//! | auto mode, offer | plans made from the first iterations of the job that they are for, and one that waits for an iteration to begin ([`auto`], [`runtime::Offer`]) |
//! | hole | a part of the static pool without memory behind it yet, a slot of a mapping without a chunk |
//! | private pool | memory for what a captured graph replays: nobody else is served from it ([`runtime::PrivatePoolId`]) |
//! | segment | contiguous addresses of one pool with memory behind all of them, for whoever looks at everything ([`runtime::Segment`]) |
//! | to occupy | an allocation occupies what it was served, which may be more than was asked for |
//! | tenant of the static pool | an allocation inside it whose planned place is taken by time, not by the plan: it blocks whoever would overlap it |

pub mod auto;
#[cfg(feature = "daemon")]
pub mod cli;
pub mod clock;
pub mod context;
#[cfg(feature = "daemon")]
pub mod daemon;
pub mod driver;
pub mod error;
mod extents;
pub mod ids;
pub mod journal;
#[cfg(feature = "daemon")]
pub mod keeper;
pub mod ladder;
pub mod ledger;
mod lifetimes;
pub mod limits;
pub mod memory;
pub mod mortal;
#[cfg(feature = "daemon")]
pub mod order;
#[cfg(feature = "daemon")]
pub mod partition;
pub mod plan;
pub mod pool;
pub mod record;
#[cfg(feature = "daemon")]
pub mod replay;
pub mod rng;
pub mod runtime;
pub mod session;
pub mod steward;
pub mod store;
mod sync;
pub mod trace;
pub mod units;
pub mod wire;
pub mod work;

/// The README's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
