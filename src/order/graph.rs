//! A graph of operators and the memory that each touches: what may come before what, and what is live when.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::OrderError;
use crate::limits;

/// A graph as somebody says it, by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Described {
    /// Tensors and their bytes, in the order in which they are said.
    pub tensors: Vec<(String, u64)>,
    /// Operators, in the order in which they run now.
    pub nodes: Vec<DescribedNode>,
    /// Who runs before whom for another reason than a tensor.
    pub control: Vec<(String, String)>,
    /// Tensors that are the same memory: views, and what is written in place.
    pub aliases: Vec<(String, String)>,
    /// Tensors that are wanted after the last operator, besides those that none reads.
    pub kept: Vec<String>,
    /// What the file says beside that, and nobody heeds.
    pub notes: Vec<String>,
}

/// An operator as somebody says it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DescribedNode {
    /// Its name, which no other has.
    pub name: String,
    /// What it reads.
    pub inputs: Vec<String>,
    /// What it makes.
    pub outputs: Vec<String>,
    /// It writes a weight: whoever reads what it overwrites runs before it.
    pub is_update: bool,
    /// Bytes that it needs while it runs, beside its tensors.
    pub workspace: u64,
}

/// An operator.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Memory that it reads or writes, each once.
    pub(super) storages: Vec<u32>,
    pub(super) workspace: u64,
    /// Those that run after it.
    pub(super) next: Vec<u32>,
    /// How many run before it, of those that say so.
    pub(super) before: u32,
    pub(super) is_update: bool,
}

/// Memory of one tensor, or of several that are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Storage {
    pub(super) bytes: u64,
    /// Who reads or writes it.
    pub(super) users: u32,
    /// It is there before the first operator.
    pub(super) is_given: bool,
    /// It is there after the last: nobody reads it, or one of the tensors in it.
    pub(super) is_kept: bool,
}

/// A graph that was checked: every name is known, every tensor made once at most, and there is an order.
#[derive(Clone, Debug)]
pub struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) storages: Vec<Storage>,
    names: Vec<String>,
    /// The operators as they were said, or where that is no order, the nearest to it that is one.
    pub(super) given: Vec<u32>,
    /// The operators were said in an order.
    pub is_given_ordered: bool,
    /// A name for each storage: its first tensor.
    storage_names: Vec<String>,
}

impl Graph {
    /// Checks a description.
    ///
    /// Tensors that no operator makes are there from the start; those that no operator reads are there until the end.
    ///
    /// # Errors
    ///
    /// Names that nobody knows or that come twice, operators that wait for each other, sizes beyond any machine.
    pub fn of(described: &Described) -> Result<Graph, OrderError> {
        let Described { tensors, nodes, control, aliases, kept, .. } = described;
        if nodes.is_empty() {
            return Err(OrderError::Empty);
        }
        if nodes.len() > limits::GRAPH_NODES_MAX || tensors.len() > limits::GRAPH_TENSORS_MAX {
            return Err(OrderError::TooManyNodes { nodes: nodes.len(), tensors: tensors.len() });
        }
        let tensor_of = numbered(tensors.iter().map(|(name, _)| name))
            .map_err(|name| OrderError::Twice { what: "tensor", name: name.to_owned() })?;
        let node_of = numbered(nodes.iter().map(|node| &node.name))
            .map_err(|name| OrderError::Twice { what: "node", name: name.to_owned() })?;
        let tensor = |name: &String, of: &dyn Fn() -> String| {
            let unknown = || OrderError::Unknown { what: "tensor", name: name.clone(), of: of() };
            tensor_of.get(name.as_str()).copied().ok_or_else(unknown)
        };
        let mut makers: Vec<Option<u32>> = vec![None; tensors.len()];
        let mut readers: Vec<Vec<u32>> = vec![Vec::new(); tensors.len()];
        for (number, node) in nodes.iter().enumerate() {
            let of = || format!("node '{}'", node.name);
            for name in &node.outputs {
                let made = &mut makers[tensor(name, &of)? as usize];
                if let Some(first) = made.replace(number as u32) {
                    let first = nodes[first as usize].name.clone();
                    return Err(OrderError::MadeTwice { tensor: name.clone(), first, second: node.name.clone() });
                }
            }
            for name in &node.inputs {
                readers[tensor(name, &of)? as usize].push(number as u32);
            }
        }
        let mut same: Vec<u32> = (0..tensors.len() as u32).collect();
        let mut pairs = Vec::with_capacity(aliases.len());
        for (one, other) in aliases {
            let of = || "aliases".to_owned();
            let pair = [tensor(one, &of)?, tensor(other, &of)?];
            pairs.push(pair);
            let [one, other] = pair.map(|tensor| root(&mut same, tensor));
            // The first that was said stands for all.
            same[one.max(other) as usize] = one.min(other);
        }
        let mut edges: BTreeSet<(u32, u32)> = BTreeSet::new();
        for (maker, readers) in makers.iter().zip(&readers) {
            edges.extend(maker.iter().flat_map(|maker| readers.iter().map(move |reader| (*maker, *reader))));
        }
        for (before, after) in control {
            let node = |name: &String| {
                let unknown = || OrderError::Unknown { what: "node", name: name.clone(), of: "control".to_owned() };
                node_of.get(name.as_str()).copied().ok_or_else(unknown)
            };
            edges.insert((node(before)?, node(after)?));
        }
        let mut graph = Graph {
            nodes: nodes
                .iter()
                .map(|node| Node {
                    storages: Vec::new(),
                    workspace: node.workspace,
                    next: Vec::new(),
                    before: 0,
                    is_update: node.is_update,
                })
                .collect(),
            storages: Vec::new(),
            names: nodes.iter().map(|node| node.name.clone()).collect(),
            given: Vec::new(),
            is_given_ordered: true,
            storage_names: Vec::new(),
        };
        graph.connect(&edges);
        graph.given = graph.sorted()?;
        let (updates, users) = overwritten(nodes, &makers, &readers, &mut same);
        if !updates.is_empty() {
            // What an update overwrites by name is read before, by all but those that come after the update anyway.
            let by_name: BTreeSet<(u32, u32)> = pairs
                .iter()
                .flat_map(|[one, other]| [(*one, *other), (*other, *one)])
                .filter_map(|(old, new)| {
                    let update = makers[new as usize].filter(|maker| nodes[*maker as usize].is_update)?;
                    readers[old as usize].contains(&update).then_some((old, update))
                })
                .collect();
            let place = graph.places();
            for (old, update) in by_name {
                let readers: BTreeSet<u32> = readers[old as usize].iter().copied().collect();
                let after = graph.among_after(update, &readers, &place);
                let others = readers.difference(&after).filter(|reader| **reader != update);
                edges.extend(others.map(|reader| (*reader, update)));
                few(&edges)?;
            }
            graph.connect(&edges);
            graph.given = graph.sorted()?;
            // By any other name it is what it was or what it has become as it is said: before the update, or after it.
            let place = graph.places();
            for (memory, users) in users {
                let mut in_turn: Vec<(u32, u32)> = users.iter().map(|user| (place[*user as usize], *user)).collect();
                in_turn.sort_unstable();
                // Each comes after the update before it and before the one behind it, which come after each other.
                let (mut last, mut since) = (None, Vec::new());
                for (_, user) in in_turn {
                    edges.extend(last.map(|update| (update, user)));
                    if updates.contains(&(user, memory)) {
                        edges.extend(since.drain(..).map(|before| (before, user)));
                        last = Some(user);
                    } else {
                        since.push(user);
                    }
                }
            }
            graph.connect(&edges);
            graph.given = graph.sorted()?;
        }
        graph.is_given_ordered = graph.given.iter().enumerate().all(|(at, node)| at == *node as usize);
        let mut is_kept: Vec<bool> = readers.iter().map(Vec::is_empty).collect();
        for name in kept {
            is_kept[tensor(name, &|| "keep".to_owned())? as usize] = true;
        }
        graph.store(tensors, &makers, &readers, &is_kept, &mut same)?;
        Ok(graph)
    }

    /// How many operators there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// What memory is called: by its first tensor.
    pub fn storage_name(&self, storage: u32) -> &str {
        &self.storage_names[storage as usize]
    }

    /// What an operator is called.
    pub fn name(&self, node: u32) -> &str {
        &self.names[node as usize]
    }

    /// The operators as they were said.
    pub fn given(&self) -> &[u32] {
        &self.given
    }

    fn connect(&mut self, edges: &BTreeSet<(u32, u32)>) {
        self.nodes.iter_mut().for_each(|node| (node.next.clear(), node.before = 0).1);
        for (before, after) in edges {
            self.nodes[*before as usize].next.push(*after);
            self.nodes[*after as usize].before += 1;
        }
    }

    /// An order: of those that may come, always the one that was said first.
    fn sorted(&self) -> Result<Vec<u32>, OrderError> {
        let mut left: Vec<u32> = self.nodes.iter().map(|node| node.before).collect();
        let mut ready: BTreeSet<u32> = (0..self.nodes.len() as u32).filter(|node| left[*node as usize] == 0).collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(node) = ready.pop_first() {
            order.push(node);
            for next in &self.nodes[node as usize].next {
                left[*next as usize] -= 1;
                if left[*next as usize] == 0 {
                    ready.insert(*next);
                }
            }
        }
        if order.len() == self.nodes.len() {
            return Ok(order);
        }
        Err(OrderError::Cycle { nodes: self.circle(&left) })
    }

    /// Some operators that wait for each other, one after the other.
    fn circle(&self, left: &[u32]) -> Vec<String> {
        // Each that is left has one before it that is left: whoever goes back long enough comes to a place where it was.
        let mut before: BTreeMap<u32, u32> = BTreeMap::new();
        for (number, node) in self.nodes.iter().enumerate().filter(|(number, _)| left[*number] > 0) {
            for next in node.next.iter().filter(|next| left[**next as usize] > 0) {
                before.insert(*next, number as u32);
            }
        }
        let Some(mut at) = before.keys().next().copied() else { return Vec::new() };
        let mut seen = BTreeSet::new();
        while seen.insert(at) {
            at = before[&at];
        }
        let mut circle = vec![at];
        while before[&at] != circle[0] {
            at = before[&at];
            circle.push(at);
        }
        circle.reverse();
        circle.into_iter().map(|node| self.name(node).to_owned()).collect()
    }

    /// For each operator those that run before it, of those that say so.
    pub(super) fn before(&self) -> Vec<Vec<u32>> {
        let mut before = vec![Vec::new(); self.len()];
        for (number, node) in self.nodes.iter().enumerate() {
            node.next.iter().for_each(|next| before[*next as usize].push(number as u32));
        }
        before
    }

    /// For each memory the operators that use it.
    pub(super) fn users(&self) -> Vec<Vec<u32>> {
        let mut users = vec![Vec::new(); self.storages.len()];
        for (number, node) in self.nodes.iter().enumerate() {
            node.storages.iter().for_each(|storage| users[*storage as usize].push(number as u32));
        }
        users
    }

    /// All that run after an operator.
    #[cfg(feature = "ilp")]
    pub(super) fn after(&self, node: u32) -> BTreeSet<u32> {
        let mut after = BTreeSet::new();
        let mut open = vec![node];
        while let Some(node) = open.pop() {
            open.extend(self.nodes[node as usize].next.iter().filter(|next| after.insert(**next)));
        }
        after
    }

    /// Where each operator stands in the order that is given.
    fn places(&self) -> Vec<u32> {
        let mut places = vec![0; self.nodes.len()];
        self.given.iter().zip(0_u32..).for_each(|(node, at)| places[*node as usize] = at);
        places
    }

    /// Of some operators those that run after another. Nobody who runs after it is before it in an order, `place`; so little is looked at where few are behind it.
    fn among_after(&self, node: u32, of: &BTreeSet<u32>, place: &[u32]) -> BTreeSet<u32> {
        let at = |node: &u32| place[*node as usize];
        let Some(last) = of.iter().map(at).max().filter(|last| *last > at(&node)) else { return BTreeSet::new() };
        let (mut after, mut open) = (HashSet::new(), vec![node]);
        while let Some(node) = open.pop() {
            let next = self.nodes[node as usize].next.iter();
            open.extend(next.filter(|next| at(next) <= last && after.insert(**next)));
        }
        of.iter().copied().filter(|one| after.contains(one)).collect()
    }

    /// Puts tensors that are the same into one piece of memory.
    fn store(
        &mut self,
        tensors: &[(String, u64)],
        makers: &[Option<u32>],
        readers: &[Vec<u32>],
        kept: &[bool],
        same: &mut [u32],
    ) -> Result<(), OrderError> {
        let mut number: HashMap<u32, u32> = HashMap::new();
        let mut users: Vec<BTreeSet<u32>> = Vec::new();
        for (tensor, (name, bytes)) in tensors.iter().enumerate() {
            let first = root(same, tensor as u32);
            let storage = *number.entry(first).or_insert_with(|| {
                self.storages.push(Storage::default());
                self.storage_names.push(name.clone());
                users.push(BTreeSet::new());
                self.storages.len() as u32 - 1
            }) as usize;
            let Storage { bytes: most, is_given, is_kept, .. } = &mut self.storages[storage];
            *most = (*most).max(*bytes);
            *is_given |= makers[tensor].is_none();
            *is_kept |= kept[tensor];
            users[storage].extend(makers[tensor].iter().chain(&readers[tensor]));
        }
        for (number, users) in users.iter().enumerate() {
            self.storages[number].users = users.len() as u32;
            users.iter().for_each(|user| self.nodes[*user as usize].storages.push(number as u32));
        }
        let mut all =
            self.storages.iter().map(|storage| storage.bytes).chain(self.nodes.iter().map(|node| node.workspace));
        let sum = all.try_fold(0_u64, u64::checked_add);
        sum.filter(|sum| *sum <= crate::units::Bytes::MAX.get()).map(drop).ok_or(OrderError::TooLarge)
    }
}

/// Who reads each memory, by its first tensor.
type Users = BTreeMap<u32, BTreeSet<u32>>;

fn few(edges: &BTreeSet<(u32, u32)>) -> Result<(), OrderError> {
    if edges.len() > limits::GRAPH_EDGES_MAX { Err(OrderError::TooManyEdges) } else { Ok(()) }
}

/// Updates, each with the memory that it overwrites, and by memory who reads it under whatever name.
fn overwritten(
    nodes: &[DescribedNode],
    makers: &[Option<u32>],
    readers: &[Vec<u32>],
    same: &mut [u32],
) -> (BTreeSet<(u32, u32)>, Users) {
    let mut updates = BTreeSet::new();
    for (tensor, maker) in (0..).zip(makers) {
        if let Some(update) = maker.filter(|maker| nodes[*maker as usize].is_update) {
            updates.insert((update, root(same, tensor)));
        }
    }
    let memories: BTreeSet<u32> = updates.iter().map(|(_, memory)| *memory).collect();
    let mut users = Users::new();
    for (tensor, all) in (0..).zip(readers) {
        let memory = root(same, tensor);
        if memories.contains(&memory) {
            users.entry(memory).or_default().extend(all);
        }
    }
    updates.retain(|(update, memory)| users.get(memory).is_some_and(|users| users.contains(update)));
    (updates, users)
}

/// What a name's number is; or a name that comes twice.
fn numbered<'a>(names: impl Iterator<Item = &'a String>) -> Result<HashMap<&'a str, u32>, &'a str> {
    let mut numbers = HashMap::new();
    for (number, name) in names.enumerate() {
        if numbers.insert(name.as_str(), number as u32).is_some() {
            return Err(name);
        }
    }
    Ok(numbers)
}

/// Who stands for all that are the same as this one.
fn root(same: &mut [u32], mut tensor: u32) -> u32 {
    while same[tensor as usize] != tensor {
        let above = same[tensor as usize];
        same[tensor as usize] = same[above as usize];
        tensor = above;
    }
    tensor
}
