//! OLLA: the order of operators that needs the least memory, and then their places (Steiner et al., arXiv 2210.12924).
//!
//! `graph → order → places`: [`Graph`] checks what may come before what, [`order`] looks for the order with the lowest peak, [`place()`]
//! gives every tensor an address by the solvers of [`crate::plan`].
//!
//! Not for: changing what is computed. An order is one of those that the graph allows; nothing is computed twice and nothing left out.

mod bound;
mod graph;
#[cfg(feature = "ilp")]
pub mod ilp;
mod lives;
mod moves;
mod onnx;
mod place;
mod search;
mod seeds;
mod spans;
mod view;
mod walk;
mod written;

pub use graph::{Described, DescribedNode, Graph};
pub use lives::{Life, Of, curve, lives, trace};
pub use onnx::read_onnx;
pub use place::{Placed, place};
pub use spans::{Spans, anchors};
pub use written::{read, to_json, whole};

use crate::error::ErrorKind;
use crate::limits;
use crate::work::{Budget, Work};
use search::Answer;

/// Why a graph cannot be ordered.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum OrderError {
    /// There is nothing to order.
    #[error("the graph has no nodes")]
    Empty,
    /// More than anybody has.
    #[error(
        "{nodes} nodes and {tensors} tensors: at most {} and {}",
        limits::GRAPH_NODES_MAX,
        limits::GRAPH_TENSORS_MAX
    )]
    TooManyNodes {
        /// As it has.
        nodes: usize,
        /// As it has.
        tensors: usize,
    },
    /// Operators that wait for too many others.
    #[error(
        "operators wait for each other in more than {} ways: an update waits for all that read what it overwrites",
        limits::GRAPH_EDGES_MAX
    )]
    TooManyEdges,
    /// A name that nobody knows.
    #[error("{of}: there is no {what} '{name}'")]
    Unknown {
        /// What was looked for.
        what: &'static str,
        /// Its name.
        name: String,
        /// Who names it.
        of: String,
    },
    /// A name that two have.
    #[error("there are two of the {what} '{name}'")]
    Twice {
        /// What they are.
        what: &'static str,
        /// Their name.
        name: String,
    },
    /// A tensor that is made again.
    #[error("tensor '{tensor}' is made twice, by '{first}' and by '{second}'")]
    MadeTwice {
        /// Which.
        tensor: String,
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// Operators that wait for each other.
    #[error("no order has these: each waits for the one before, and the first for the last: {}", nodes.join(" -> "))]
    Cycle {
        /// One after the other.
        nodes: Vec<String>,
    },
    /// It is no graph.
    #[error("no graph: {0}")]
    Unreadable(String),
    /// A tensor has no size.
    #[error("tensor '{tensor}': {found} is not a number of bytes")]
    Size {
        /// Which.
        tensor: String,
        /// What is there instead.
        found: String,
    },
    /// A solver gave no order.
    #[error("the solver has no order after {seconds} s")]
    Unsolved {
        /// How long it was given.
        seconds: f64,
    },
    /// Sums pass any address space.
    #[error("the tensors together are larger than any machine")]
    TooLarge,
}

impl OrderError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

/// An order and what it needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ordered {
    /// Numbers of operators, as they were said.
    pub order: Vec<u32>,
    /// The most that is live at one time in it.
    pub peak: u64,
    /// The same in the order as it was.
    pub initial_peak: u64,
    /// No order needs less than this.
    pub lower_bound: u64,
    /// Looks at operators that it took.
    pub work_units: u64,
}

impl Ordered {
    /// No order needs less.
    pub fn is_proven(&self) -> bool {
        self.peak == self.lower_bound
    }
}

/// Places at a level, from the first try to the last.
const WIDTHS: [usize; 6] = [1, 4, 16, 128, 1_024, 8_192];
/// So much of the work, a part of it, goes to the first look.
const FIRST: u64 = 8;

/// Looks for the order with the lowest peak: at worst it is the one that is there. `told` hears of each that is better.
pub fn order(graph: &Graph, budget: &Budget, mut told: impl FnMut(&Ordered)) -> Ordered {
    let initial_peak = walk::peak_of(graph, graph.given());
    let mut best = Ordered {
        order: graph.given().to_vec(),
        peak: initial_peak,
        initial_peak,
        lower_bound: bound::lower_bound(graph),
        work_units: 0,
    };
    let mut work = Work::of(budget);
    told(&best);
    // Where a pass along one way finds the best that there can be nothing else is asked.
    work.with(budget.units / FIRST, |work| best.look(graph, &WIDTHS[..1], work, &mut told));
    if !best.is_proven() && !work.is_over() {
        let forward = view::View::of(graph);
        let backward = forward.reversed();
        for order in seeds::orders(&forward, &backward, &mut work) {
            best.take(graph, order, &work, &mut told);
        }
        let order = work.with(work.left() / 2, |work| moves::improve(&forward, &backward, &best.order, work));
        best.take(graph, order, &work, &mut told);
        best.look(graph, &WIDTHS, &mut work, &mut told);
    }
    best.work_units = work.done();
    best
}

impl Ordered {
    /// An order that may be better.
    fn take(&mut self, graph: &Graph, order: Vec<u32>, work: &Work, told: &mut impl FnMut(&Ordered)) {
        let peak = walk::peak_of(graph, &order);
        if peak < self.peak {
            (self.order, self.peak, self.work_units) = (order, peak, work.done());
            told(self);
        }
    }

    /// Asks for better ones, with so many places at each level.
    fn look(&mut self, graph: &Graph, widths: &[usize], work: &mut Work, told: &mut impl FnMut(&Ordered)) {
        for width in widths {
            // What one width cannot do another may. The best that there can be is tried first, and then whether there is anything better at all.
            let mut hopeless = self.lower_bound.saturating_sub(1);
            let mut limit = self.lower_bound;
            let mut tries = 0;
            while self.peak > self.lower_bound && hopeless + 1 < self.peak {
                if work.is_over() {
                    return;
                }
                tries += 1;
                match search::within(graph, limit, *width, work) {
                    Answer::Order(order, _) => self.take(graph, order, work, told),
                    Answer::None => {
                        self.lower_bound = self.lower_bound.max(limit + 1);
                        hopeless = limit;
                    }
                    Answer::Unknown => hopeless = limit,
                }
                let (least, most) = (hopeless.max(self.lower_bound - 1) + 1, self.peak - 1);
                limit = if tries == 1 { most } else { least + most.saturating_sub(least) / 2 };
            }
        }
    }
}

#[cfg(test)]
mod tests;
