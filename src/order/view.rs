//! A graph as it is walked from its beginning, or from its end: the same memory is live in an order and in its reverse, so whatever finds the one finds the other.

use super::graph::Graph;

/// See above.
#[derive(Debug)]
pub(super) struct View {
    /// Those that come after each operator.
    pub(super) next: Vec<Vec<u32>>,
    /// Those that come before it.
    pub(super) before: Vec<Vec<u32>>,
    /// Memory that it uses, each once, and bytes that it needs beside.
    pub(super) storages: Vec<Vec<u32>>,
    pub(super) workspace: Vec<u64>,
    pub(super) memory: Vec<Memory>,
    /// An order.
    pub(super) given: Vec<u32>,
}

/// Memory of a view.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) bytes: u64,
    pub(super) users: Vec<u32>,
    /// It is there before the first operator.
    pub(super) is_there: bool,
    /// It is there after the last.
    pub(super) stays: bool,
}

impl View {
    pub(super) fn of(graph: &Graph) -> View {
        let memory = graph.storages.iter().zip(graph.users()).map(|(storage, users)| Memory {
            bytes: storage.bytes,
            users,
            is_there: storage.is_given,
            stays: storage.is_kept,
        });
        View {
            next: graph.nodes.iter().map(|node| node.next.clone()).collect(),
            before: graph.before(),
            storages: graph.nodes.iter().map(|node| node.storages.clone()).collect(),
            workspace: graph.nodes.iter().map(|node| node.workspace).collect(),
            memory: memory.collect(),
            given: graph.given.clone(),
        }
    }

    /// From the other end.
    pub(super) fn reversed(&self) -> View {
        let turned = |memory: &Memory| Memory { is_there: memory.stays, stays: memory.is_there, ..memory.clone() };
        View {
            next: self.before.clone(),
            before: self.next.clone(),
            storages: self.storages.clone(),
            workspace: self.workspace.clone(),
            memory: self.memory.iter().map(turned).collect(),
            given: self.given.iter().rev().copied().collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.next.len()
    }

    /// What is live before the first operator.
    pub(super) fn live_at_start(&self) -> u64 {
        self.memory.iter().filter(|memory| memory.is_there).map(|memory| memory.bytes).sum()
    }

    /// Looks at memory that a walk through all takes.
    pub(super) fn looks(&self) -> u64 {
        self.storages.iter().map(|storages| 1 + storages.len() as u64).sum()
    }
}
