//! OLLA's integer program (equations 1 to 14 of the paper), given to HiGHS: the reference for small graphs, and for whoever wants to compare.
//!
//! In place of a variable for each tensor's creation there is one for each operator's step, which ties the outputs of one operator together
//! (equation 5). A step at which an operator cannot run has no variable (equation 10), and memory none where it is of no use or of use for
//! certain (equations 11 and 12). The joint program (equation 9) has addresses, too, and for each pair of tensors that can be live together
//! which of them lies below.

use std::collections::HashMap;
use std::time::Duration;

use highs::{Col, HighsModelStatus, RowProblem, Sense};

use super::graph::Graph;
use super::spans::{Spans, anchors};
use super::walk::{Walk, peak_of};
use super::{OrderError, bound};

/// What the solver found.
#[derive(Clone, PartialEq, Debug)]
pub struct Solved {
    /// An order.
    pub order: Vec<u32>,
    /// The most that is live in it; of the joint program, what its places span.
    pub peak: u64,
    /// The solver has proven that none is better.
    pub is_proven: bool,
}

/// A sum of variables and a number.
#[derive(Clone, Default)]
struct Sum {
    terms: Vec<(Col, f64)>,
    number: f64,
}

/// The program while it is written.
struct Program<'a> {
    graph: &'a Graph,
    rows: RowProblem,
    spans: Spans,
    /// For each operator and each step of its span, whether it runs then.
    runs: Vec<Vec<Col>>,
    users: Vec<Vec<u32>>,
    /// Bytes are divided by this: solvers do not like large numbers.
    unit: f64,
}

/// The order with the lowest peak (equation 14).
///
/// # Errors
///
/// The solver finds no answer in that time.
pub fn order(graph: &Graph, are_early: bool, limit: Duration) -> Result<Solved, OrderError> {
    let mut program = Program::of(graph, are_early);
    let peak = program.peak();
    for step in 0..graph.len() as u32 {
        let mut live = Sum::default();
        for storage in 0..graph.storages.len() {
            let (live_then, bytes) = (program.live(storage, step), graph.storages[storage].bytes as f64 / program.unit);
            live.add(&live_then, bytes);
        }
        for node in 0..graph.len() {
            let workspace = graph.nodes[node].workspace as f64 / program.unit;
            if workspace > 0.0 {
                let now = program.runs_at(node as u32, step);
                live.add(&now, workspace);
            }
        }
        live.terms.push((peak, -1.0));
        program.at_most(&live, 0.0);
    }
    let (order, is_proven) = program.solve(limit)?;
    Ok(Solved { peak: peak_of(graph, &order), order, is_proven })
}

/// Order and places together (equation 9). Workspaces are not placed.
///
/// # Errors
///
/// The solver finds no answer in that time.
pub fn joint(graph: &Graph, limit: Duration) -> Result<Solved, OrderError> {
    let mut program = Program::of(graph, false);
    let peak = program.peak();
    let all: f64 = graph.storages.iter().map(|storage| storage.bytes as f64 / program.unit).sum();
    let steps = graph.len() as u32;
    let live: Vec<Vec<Sum>> =
        (0..graph.storages.len()).map(|storage| (0..steps).map(|step| program.live(storage, step)).collect()).collect();
    let sizes: Vec<f64> = graph.storages.iter().map(|storage| storage.bytes as f64 / program.unit).collect();
    let places: Vec<Col> = sizes.iter().map(|_| program.rows.add_column(0.0, 0.0..)).collect();
    for (place, size) in places.iter().zip(&sizes) {
        program.rows.add_row(..=-size, [(*place, 1.0), (peak, -1.0)]);
    }
    for one in 0..sizes.len() {
        for other in one + 1..sizes.len() {
            if sizes[one] == 0.0 || sizes[other] == 0.0 || !program.can_meet(one, other) {
                continue;
            }
            let [below, above] = [(); 2].map(|()| program.rows.add_integer_column(0.0, 0.0..=1.0));
            for step in 0..steps as usize {
                // Live together: one of the two is below.
                let mut sum = Sum::default();
                sum.add(&live[one][step], 1.0);
                sum.add(&live[other][step], 1.0);
                sum.terms.extend([(below, -1.0), (above, -1.0)]);
                program.at_most(&sum, 1.0);
            }
            program.rows.add_row(..=all - sizes[one], [(places[one], 1.0), (places[other], -1.0), (below, all)]);
            program.rows.add_row(..=all - sizes[other], [(places[other], 1.0), (places[one], -1.0), (above, all)]);
        }
    }
    let unit = program.unit;
    let (order, is_proven, columns) = program.solve_for(limit, &[peak])?;
    Ok(Solved { order, peak: (columns[0] * unit).round() as u64, is_proven })
}

impl Sum {
    fn add(&mut self, other: &Sum, times: f64) {
        self.terms.extend(other.terms.iter().map(|(column, factor)| (*column, factor * times)));
        self.number += other.number * times;
    }
}

impl<'a> Program<'a> {
    fn of(graph: &'a Graph, are_early: bool) -> Program<'a> {
        let spans = Spans::of(graph);
        let mut rows = RowProblem::default();
        let mut runs = Vec::with_capacity(graph.len());
        for node in 0..graph.len() {
            let steps = spans.asap[node]..=spans.alap[node];
            let columns: Vec<Col> = steps.map(|_| rows.add_integer_column(0.0, 0.0..=1.0)).collect();
            // It runs, once (equation 3).
            rows.add_row(1.0..=1.0, columns.iter().map(|column| (*column, 1.0)).collect::<Vec<_>>());
            runs.push(columns);
        }
        let users = graph.users();
        let largest = graph.storages.iter().map(|storage| storage.bytes).max().unwrap_or(1).max(1);
        let mut program = Program { graph, rows, spans, runs, users, unit: largest as f64 / 1000.0 };
        let edges =
            graph.nodes.iter().enumerate().flat_map(|(node, of)| of.next.iter().map(move |next| (node as u32, *next)));
        let mut edges: Vec<(u32, u32)> = edges.collect();
        if are_early {
            edges.extend(anchors(graph));
        }
        for (before, after) in edges {
            // What is read was made at an earlier step (equation 4).
            for step in program.spans.asap[after as usize]..=program.spans.alap[after as usize] {
                let mut sum = program.done(after, Some(step));
                let made = program.done(before, step.checked_sub(1));
                sum.add(&made, -1.0);
                program.at_most(&sum, 0.0);
            }
        }
        program
    }

    fn peak(&mut self) -> Col {
        let least = bound::lower_bound(self.graph) as f64 / self.unit;
        self.rows.add_column(1.0, least..)
    }

    fn at_most(&mut self, sum: &Sum, most: f64) {
        // A variable stands once in a row, or HiGHS takes none of it.
        let mut places: HashMap<Col, usize> = HashMap::new();
        let mut terms: Vec<(Col, f64)> = Vec::with_capacity(sum.terms.len());
        for (column, factor) in &sum.terms {
            let place = *places.entry(*column).or_insert(terms.len());
            match terms.get_mut(place) {
                Some((_, sum)) => *sum += factor,
                None => terms.push((*column, *factor)),
            }
        }
        if !terms.is_empty() {
            self.rows.add_row(..=most - sum.number, terms);
        }
    }

    /// Whether an operator runs at a step.
    fn runs_at(&self, node: u32, step: u32) -> Sum {
        let column =
            step.checked_sub(self.spans.asap[node as usize]).and_then(|at| self.runs[node as usize].get(at as usize));
        Sum { terms: column.map(|column| (*column, 1.0)).into_iter().collect(), number: 0.0 }
    }

    /// Whether an operator has run by the end of a step.
    fn done(&self, node: u32, step: Option<u32>) -> Sum {
        let Some(step) = step else { return Sum::default() };
        if step >= self.spans.alap[node as usize] {
            return Sum { terms: Vec::new(), number: 1.0 };
        }
        let steps = (step + 1).saturating_sub(self.spans.asap[node as usize]) as usize;
        Sum { terms: self.runs[node as usize][..steps].iter().map(|column| (*column, 1.0)).collect(), number: 0.0 }
    }

    /// Whether memory is live at a step: somebody has begun to use it, and somebody has not ended before.
    fn live(&mut self, storage: usize, step: u32) -> Sum {
        let (graph, users) = (self.graph, self.users[storage].clone());
        let whole = Sum { terms: Vec::new(), number: 1.0 };
        let about = &graph.storages[storage];
        let Some((first, last)) = self.spans.useful(&users) else { return whole };
        if !about.is_given && step < first || !about.is_kept && step > last {
            return Sum::default();
        }
        let begun = if about.is_given {
            vec![whole.clone()]
        } else {
            users.iter().map(|user| self.done(*user, Some(step))).collect()
        };
        let ended = if about.is_kept {
            vec![Sum::default()]
        } else {
            users.iter().map(|user| self.done(*user, step.checked_sub(1))).collect()
        };
        let live = self.rows.add_column(0.0, 0.0..=1.0);
        for begun in &begun {
            for ended in &ended {
                let mut sum = begun.clone();
                sum.add(ended, -1.0);
                sum.terms.push((live, -1.0));
                self.at_most(&sum, 0.0);
            }
        }
        Sum { terms: vec![(live, 1.0)], number: 0.0 }
    }

    /// They can be live at one time: their stretches overlap, and no order has one end before the other begins (section 4.2).
    fn can_meet(&self, one: usize, other: usize) -> bool {
        let all = (0, self.graph.len() as u32 - 1);
        let stretch = |storage: usize| {
            let (first, last) = self.spans.useful(&self.users[storage]).unwrap_or(all);
            let about = &self.graph.storages[storage];
            (if about.is_given { 0 } else { first }, if about.is_kept { all.1 } else { last })
        };
        let (a, b) = (stretch(one), stretch(other));
        a.0 <= b.1 && b.0 <= a.1 && !self.is_before(one, other) && !self.is_before(other, one)
    }

    /// All that use the one run before any that uses the other.
    fn is_before(&self, one: usize, other: usize) -> bool {
        if self.graph.storages[one].is_kept || self.graph.storages[other].is_given {
            return false;
        }
        self.users[one].iter().all(|user| {
            let after = self.graph.after(*user);
            self.users[other].iter().all(|later| after.contains(later))
        })
    }

    fn solve(self, limit: Duration) -> Result<(Vec<u32>, bool), OrderError> {
        self.solve_for(limit, &[]).map(|(order, is_proven, _)| (order, is_proven))
    }

    fn solve_for(self, limit: Duration, wanted: &[Col]) -> Result<(Vec<u32>, bool, Vec<f64>), OrderError> {
        let refused = |_| OrderError::Unsolved { seconds: 0.0 };
        let mut model = self.rows.try_optimise(Sense::Minimise).map_err(refused)?;
        model.set_option("time_limit", limit.as_secs_f64());
        model.set_option("mip_rel_gap", 1e-9);
        model.set_option("output_flag", false);
        let solved = model.solve();
        let is_proven = solved.status() == HighsModelStatus::Optimal;
        let solution = solved.get_solution();
        // Steps may hold several operators, which come in the order in which they were said.
        let mut steps: Vec<(u32, u32)> = Vec::with_capacity(self.graph.len());
        for (node, columns) in self.runs.iter().enumerate() {
            let at = columns.iter().position(|column| solution[*column] > 0.5);
            let unknown = || OrderError::Unsolved { seconds: limit.as_secs_f64() };
            steps.push((self.spans.asap[node] + at.ok_or_else(unknown)? as u32, node as u32));
        }
        steps.sort_unstable();
        let order: Vec<u32> = steps.into_iter().map(|(_, node)| node).collect();
        // Never trusted: it has to be an order.
        let mut walk = Walk::of(self.graph);
        for node in &order {
            if walk.ready.binary_search(node).is_err() {
                return Err(OrderError::Unsolved { seconds: limit.as_secs_f64() });
            }
            walk.run(*node);
        }
        Ok((order, is_proven, wanted.iter().map(|column| solution[*column]).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{least, random};
    use super::*;
    use crate::rng::Rng;

    const PATIENT: Duration = Duration::from_secs(20);

    #[test]
    fn the_program_finds_what_trying_every_order_finds() {
        let mut rng = Rng::new(5);
        let (mut early, mut tried) = (0, 0);
        for _ in 0..60 {
            let len = 2 + rng.index(6);
            let described = random(&mut rng, len);
            let graph = Graph::of(&described).unwrap();
            let mut best = u64::MAX;
            least(&Walk::of(&graph), &mut best);
            let solved = order(&graph, false, PATIENT).unwrap();
            assert!(solved.is_proven && solved.peak == best, "{} and not {best}: {described:?}", solved.peak);
            // Anchors leave orders out, and with some graphs all.
            if let Ok(solved) = order(&graph, true, PATIENT) {
                tried += 1;
                assert!(solved.peak >= best);
                early += usize::from(solved.peak == best);
            }
        }
        assert!(early * 10 >= tried * 9, "with early updates {early} of {tried} are as good");
    }

    #[test]
    fn the_joint_program_needs_no_less_than_order_and_then_places() {
        let mut rng = Rng::new(6);
        for _ in 0..20 {
            let len = 2 + rng.index(4);
            let mut described = random(&mut rng, len);
            described.nodes.iter_mut().for_each(|node| node.workspace = 0);
            let graph = Graph::of(&described).unwrap();
            let mut best = u64::MAX;
            least(&Walk::of(&graph), &mut best);
            let joint = joint(&graph, PATIENT).unwrap();
            assert!(joint.is_proven && joint.peak >= best);
            let found = super::super::order(&graph, &crate::work::Budget::of(1_000_000), |_| {});
            let lives = super::super::lives(&graph, &found.order);
            if lives.is_empty() {
                continue;
            }
            let placed = super::super::place(&lives, 1, &crate::plan::solve::patient()).unwrap();
            assert_eq!(placed.peak, joint.peak, "{described:?}");
        }
    }
}
