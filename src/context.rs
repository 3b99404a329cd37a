//! Where in its job a thread is: a stack of contexts for each thread, pushed by whoever knows (hooks of a framework) and asked for at every allocation.
//!
//! What a push costs is paid once for a context: its key is kept by the thread that pushed it, and its words by the process, so that a recorder can name them. Asking is one look at the
//! thread's own cell.
//!
//! Not for: what a context means to a plan or a trace ([`crate::trace`]), and not for the end of a phase that nobody pops.
//!
//! Invariant: [`here`] takes no lock, allocates nothing and calls nobody, whatever other threads do. What is kept is bounded by [`limits`]; a context beyond them has the key
//! [`ContextKey::UNKNOWN`] and is counted.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::limits;
use crate::trace::{Context, ContextKey, Phase};

/// What a thread says of its allocations now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Here {
    /// The innermost context.
    pub key: ContextKey,
    /// What is asked for in it varies.
    pub is_dynamic: bool,
}

/// A context in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    /// Part of the iteration.
    pub phase: Phase,
    /// Micro-batch.
    pub microbatch: Option<u32>,
    /// Model chunk of a virtual pipeline.
    pub chunk: Option<u32>,
    /// The module's name; empty for none.
    pub module: Arc<str>,
}

impl Named {
    fn key(&self) -> ContextKey {
        let Named { phase, microbatch, chunk, .. } = *self;
        ContextKey::of(&Context { phase, microbatch, chunk, module: 0 }, &self.module)
    }
}

/// What a thread pushes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pushed<'a> {
    /// Part of the iteration.
    pub phase: Phase,
    /// Micro-batch.
    pub microbatch: Option<u32>,
    /// Model chunk of a virtual pipeline.
    pub chunk: Option<u32>,
    /// The module's name; empty for none.
    pub module: &'a str,
    /// What is asked for in it varies from iteration to iteration.
    pub is_dynamic: bool,
}

/// The stack is as deep as it may be. The push is counted, so that its pop takes nothing else away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "more than {} contexts inside each other; what is deeper counts as the innermost of them",
    limits::CONTEXT_DEPTH_MAX
)]
pub struct TooDeep;

/// A pop without a push before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no context of this thread is left to pop")]
pub struct NothingPushed;

thread_local! {
    static HERE: Cell<Here> = const { Cell::new(Here { key: ContextKey::UNKNOWN, is_dynamic: false }) };
    /// One more than the number of the thread; 0 before it has one.
    static THREAD: Cell<u32> = const { Cell::new(0) };
    static STACK: RefCell<Stack> = const { RefCell::new(Stack { outer: Vec::new(), beyond: 0, cache: Vec::new() }) };
}

/// What one thread has pushed.
struct Stack {
    /// What [`here`] said before each push.
    outer: Vec<Here>,
    /// Pushes beyond the deepest.
    beyond: u64,
    /// Contexts that the thread pushed before, each at the place that its words hash to; the last of a place stays.
    cache: Vec<Option<(Named, ContextKey)>>,
}

/// The innermost context of this thread.
#[inline]
pub fn here() -> Here {
    HERE.get()
}

/// The number of this thread among those of the process that asked, counted from 0.
#[inline]
pub fn thread() -> u32 {
    match THREAD.get() {
        0 => new_thread(),
        number => number - 1,
    }
}

#[cold]
fn new_thread() -> u32 {
    static THREADS: AtomicU32 = AtomicU32::new(0);
    let number = THREADS.fetch_add(1, Ordering::Relaxed);
    THREAD.set(number.saturating_add(1));
    number
}

/// This thread goes into a context.
///
/// # Errors
///
/// [`TooDeep`]: then it stays in the one it is in, and the next pop leaves that.
pub fn push(pushed: &Pushed<'_>) -> Result<(), TooDeep> {
    // At the very end of a thread nobody asks any more.
    STACK.try_with(|stack| stack.borrow_mut().push(pushed)).unwrap_or(Ok(()))
}

/// This thread leaves the context that it went into last.
///
/// # Errors
///
/// [`NothingPushed`], and nothing has changed.
pub fn pop() -> Result<(), NothingPushed> {
    STACK.try_with(|stack| stack.borrow_mut().pop()).unwrap_or(Err(NothingPushed))
}

/// The words of a key that was pushed in this process. `None` for [`ContextKey::UNKNOWN`], and for keys that came by another way.
pub fn named(key: ContextKey) -> Option<Named> {
    table().contexts.get(&key).cloned()
}

/// Pushes whose context could not be kept, and so has no key.
pub fn unkept() -> u64 {
    UNKEPT.load(Ordering::Relaxed)
}

impl Stack {
    fn push(&mut self, pushed: &Pushed<'_>) -> Result<(), TooDeep> {
        if self.outer.len() >= limits::CONTEXT_DEPTH_MAX {
            self.beyond += 1;
            return Err(TooDeep);
        }
        self.outer.push(HERE.get());
        HERE.set(Here { key: self.key_of(pushed), is_dynamic: pushed.is_dynamic });
        Ok(())
    }

    fn pop(&mut self) -> Result<(), NothingPushed> {
        if self.beyond > 0 {
            self.beyond -= 1;
            return Ok(());
        }
        HERE.set(self.outer.pop().ok_or(NothingPushed)?);
        Ok(())
    }

    fn key_of(&mut self, pushed: &Pushed<'_>) -> ContextKey {
        if self.cache.is_empty() {
            self.cache.resize(limits::CONTEXTS_CACHED, None);
        }
        let place = place_of(pushed);
        if let Some(Some((named, key))) = self.cache.get(place)
            && is_same(named, pushed)
        {
            return *key;
        }
        let Some((named, key)) = intern(pushed) else {
            UNKEPT.fetch_add(1, Ordering::Relaxed);
            return ContextKey::UNKNOWN;
        };
        if let Some(slot) = self.cache.get_mut(place) {
            *slot = Some((named, key));
        }
        key
    }
}

fn is_same(named: &Named, pushed: &Pushed<'_>) -> bool {
    (named.phase, named.microbatch, named.chunk) == (pushed.phase, pushed.microbatch, pushed.chunk)
        && *named.module == *pushed.module
}

/// Where in a thread's cache a context stands: a quick hash, eight bytes of the name at a time.
fn place_of(pushed: &Pushed<'_>) -> usize {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(ODD).rotate_left(29);
    let number = |n: Option<u32>| n.map_or(0, |n| u64::from(n) + 1);
    let numbers = [pushed.phase as u64, number(pushed.microbatch), number(pushed.chunk)];
    let hash = numbers.into_iter().fold(pushed.module.len() as u64, step);
    let (words, rest) = pushed.module.as_bytes().as_chunks::<8>();
    let hash = words.iter().fold(hash, |hash, word| step(hash, u64::from_le_bytes(*word)));
    let hash = rest.iter().fold(hash, |hash, byte| step(hash, u64::from(*byte)));
    (step(hash, 0) >> 32) as usize % limits::CONTEXTS_CACHED
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);
static UNKEPT: AtomicU64 = AtomicU64::new(0);

/// Every context that was pushed in this process.
#[derive(Default)]
struct Table {
    contexts: HashMap<ContextKey, Named>,
    modules: HashSet<Arc<str>>,
    module_bytes: usize,
}

fn table() -> MutexGuard<'static, Table> {
    // What a panic left is no worse than nothing: entries are put in whole.
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks before a push gives up.
const LOOKS: u32 = 1_000;

/// The table, for a push. A child that was forked while another thread had it would wait for ever: after so many looks there is none.
fn table_soon() -> Option<MutexGuard<'static, Table>> {
    for _ in 0..LOOKS {
        match TABLE.try_lock() {
            Ok(table) => return Some(table),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// The context with its name as the process keeps it, and its key. `None` where it does not fit any more.
fn intern(pushed: &Pushed<'_>) -> Option<(Named, ContextKey)> {
    table_soon()?.intern(pushed)
}

impl Table {
    fn intern(&mut self, pushed: &Pushed<'_>) -> Option<(Named, ContextKey)> {
        let Pushed { phase, microbatch, chunk, module, .. } = *pushed;
        let module = self.module(module)?;
        let named = Named { phase, microbatch, chunk, module };
        let key = named.key();
        let is_full = self.contexts.len() >= limits::CONTEXTS_MAX;
        match self.contexts.entry(key) {
            Entry::Occupied(_) => {}
            Entry::Vacant(_) if is_full => return None,
            Entry::Vacant(free) => drop(free.insert(named.clone())),
        }
        Some((named, key))
    }

    fn module(&mut self, name: &str) -> Option<Arc<str>> {
        if let Some(module) = self.modules.get(name) {
            return Some(Arc::clone(module));
        }
        let bytes = self.module_bytes.checked_add(name.len())?;
        let is_full = self.modules.len() >= limits::CONTEXTS_MAX || bytes > limits::CONTEXT_NAMES_LEN_MAX;
        if is_full || name.len() > limits::TRACE_MODULE_LEN_MAX {
            return None;
        }
        let module: Arc<str> = Arc::from(name);
        self.modules.insert(Arc::clone(&module));
        self.module_bytes = bytes;
        Some(module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(module: &str) -> Pushed<'_> {
        Pushed { phase: Phase::Forward, microbatch: Some(3), module, ..Pushed::default() }
    }

    /// In a thread of its own: its stack is empty.
    fn alone(test: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(test).join().unwrap());
    }

    #[test]
    fn the_innermost_context_counts_and_its_key_is_that_of_traces() {
        alone(|| {
            assert_eq!(here(), Here::default());
            push(&at("layers.1.mlp")).unwrap();
            let context = Context { phase: Phase::Forward, microbatch: Some(3), chunk: None, module: 7 };
            let outer = Here { key: ContextKey::of(&context, "layers.1.mlp"), is_dynamic: false };
            assert_eq!(here(), outer);
            push(&Pushed { is_dynamic: true, ..at("layers.1.mlp.experts") }).unwrap();
            let inner = Here { key: ContextKey::of(&context, "layers.1.mlp.experts"), is_dynamic: true };
            assert_eq!(here(), inner);
            std::thread::scope(|scope| assert_eq!(scope.spawn(here).join().unwrap(), Here::default()));
            let words = named(inner.key).unwrap();
            assert_eq!(
                (&*words.module, words.phase, words.microbatch),
                ("layers.1.mlp.experts", Phase::Forward, Some(3))
            );
            pop().unwrap();
            assert_eq!(here(), outer);
            pop().unwrap();
            assert_eq!((here(), pop()), (Here::default(), Err(NothingPushed)));
            assert_eq!(named(ContextKey(99)), None);
        });
    }

    #[test]
    fn contexts_of_one_place_in_the_cache_have_their_own_keys() {
        alone(|| {
            let names: Vec<String> =
                (0..3 * limits::CONTEXTS_CACHED).map(|n| format!("layers.{n}.attention")).collect();
            for _ in 0..2 {
                for name in &names {
                    push(&at(name)).unwrap();
                    let context = Context { phase: Phase::Forward, microbatch: Some(3), ..Context::default() };
                    assert_eq!(here().key, ContextKey::of(&context, name));
                    pop().unwrap();
                }
            }
        });
    }

    #[test]
    fn a_stack_that_is_too_deep_is_left_again_as_it_was_entered() {
        alone(|| {
            let names: Vec<String> = (0..limits::CONTEXT_DEPTH_MAX).map(|n| n.to_string()).collect();
            names.iter().for_each(|name| push(&at(name)).unwrap());
            let deepest = here();
            assert_eq!((push(&at("beyond")), push(&at("further"))), (Err(TooDeep), Err(TooDeep)));
            assert_eq!(here(), deepest);
            pop().unwrap();
            pop().unwrap();
            assert_eq!(here(), deepest);
            names.iter().for_each(|_| pop().unwrap());
            assert_eq!((here(), pop()), (Here::default(), Err(NothingPushed)));
        });
    }

    #[test]
    fn what_does_not_fit_any_more_is_unknown_and_what_did_stays() {
        let mut table = Table::default();
        let long = "x".repeat(limits::TRACE_MODULE_LEN_MAX);
        assert!(table.intern(&at(&format!("{long}x"))).is_none());
        let mut kept = 0;
        while table.intern(&at(&format!("{kept:08}{}", &long[8..]))).is_some() {
            kept += 1;
        }
        assert_eq!(kept, limits::CONTEXT_NAMES_LEN_MAX / limits::TRACE_MODULE_LEN_MAX);
        assert!(table.intern(&at(&format!("{:08}{}", 0, &long[8..]))).is_some());
        let mut table = Table::default();
        for chunk in 0..limits::CONTEXTS_MAX as u32 {
            assert!(table.intern(&Pushed { chunk: Some(chunk), ..at("a") }).is_some());
        }
        assert!(table.intern(&at("a")).is_none() && table.intern(&Pushed { chunk: Some(5), ..at("a") }).is_some());
    }

    #[test]
    fn a_push_that_could_not_be_kept_is_counted() {
        alone(|| {
            let before = unkept();
            let long = "y".repeat(limits::TRACE_MODULE_LEN_MAX + 1);
            push(&Pushed { is_dynamic: true, ..at(&long) }).unwrap();
            assert_eq!(here(), Here { key: ContextKey::UNKNOWN, is_dynamic: true });
            assert_eq!(unkept(), before + 1);
            pop().unwrap();
        });
    }

    #[test]
    fn threads_have_numbers_of_their_own() {
        let one = thread();
        assert_eq!(thread(), one);
        let other = std::thread::scope(|scope| scope.spawn(|| (thread(), thread())).join().unwrap());
        assert!(other.0 == other.1 && other.0 != one);
    }
}
