//! The chunk sizes that a device is cut into, and how a range of bytes is covered with them.
//!
//! A driver handle can never be cut after it was created, so its size is the unit in which memory changes hands and is stitched; each handle
//! costs a create, an export, an import and a map. Hence a ladder: large chunks where a range is made once and kept (the static
//! pool), small ones where ranges are stitched anew.

use crate::limits;
use crate::units::Bytes;

/// Some chunks of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Size of each.
    pub len: Bytes,
    /// How many.
    pub count: u64,
}

impl Part {
    /// Bytes of all of them.
    pub fn bytes(self) -> Option<Bytes> {
        self.len.checked_mul(self.count)
    }
}

/// Which chunks shall cover a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// As few as possible: the largest first.
    Largest,
    /// All of one size, rounded up to the next step of the ladder.
    Uniform(Bytes),
}

/// Chunk sizes, from small to large: powers of two, so that each is a multiple of the one below.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ladder {
    steps: Vec<Bytes>,
}

/// Steps that do not make a ladder.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LadderError {
    /// There is no step.
    #[error("a chunk ladder needs at least one size")]
    Empty,
    /// A step is not a power of two above the one below it (or at least the smallest chunk).
    #[error(
        "chunk size {step} is not a power of two of at least {below}, or is there twice; sizes go from small to large"
    )]
    NotAStep {
        /// The step.
        step: Bytes,
        /// The one below.
        below: Bytes,
    },
    /// A step is larger than a chunk can be.
    #[error("chunk size {0} is above the largest, {max}", max = limits::CHUNK_LEN_MAX)]
    TooLarge(Bytes),
}

impl Ladder {
    /// 2 MiB, 32 MiB, 256 MiB: what the host driver and today's GPUs start from.
    pub fn standard() -> Ladder {
        Ladder { steps: vec![Bytes::mib(2), Bytes::mib(32), Bytes::mib(256)] }
    }

    /// The ladder of `steps`, given from small to large.
    pub fn new(steps: Vec<Bytes>) -> Result<Ladder, LadderError> {
        let mut below = limits::CHUNK_LEN_MIN;
        for (at, step) in steps.iter().enumerate() {
            if *step > limits::CHUNK_LEN_MAX {
                return Err(LadderError::TooLarge(*step));
            }
            if !step.get().is_power_of_two() || *step < below || (at > 0 && *step == below) {
                return Err(LadderError::NotAStep { step: *step, below });
            }
            below = *step;
        }
        if steps.is_empty() { Err(LadderError::Empty) } else { Ok(Ladder { steps }) }
    }

    /// The steps, from small to large.
    pub fn steps(&self) -> &[Bytes] {
        &self.steps
    }

    /// The smallest step: everything is a multiple of it.
    pub fn smallest(&self) -> Bytes {
        self.steps[0]
    }

    /// The step that `len` is, or the next one above; the largest where none is above.
    pub fn step_at_least(&self, len: Bytes) -> Bytes {
        *self.steps.iter().find(|step| **step >= len).unwrap_or(&self.steps[self.steps.len() - 1])
    }

    /// The chunks that cover `len`, rounded up to the smallest step (`Uniform`: to its step), largest first. `None` where that passes
    /// what one acquire may ask for.
    pub fn cover(&self, len: Bytes, shape: Shape) -> Option<Vec<Part>> {
        let parts = match shape {
            Shape::Uniform(wanted) => {
                let step = self.step_at_least(wanted);
                vec![Part { len: step, count: len.round_up(step)?.get() / step.get() }]
            }
            Shape::Largest => {
                let mut left = len.round_up(self.smallest())?;
                let mut parts = Vec::new();
                for step in self.steps.iter().rev() {
                    let count = left.get() / step.get();
                    if count > 0 {
                        parts.push(Part { len: *step, count });
                    }
                    left = Bytes::new(left.get() % step.get());
                }
                parts
            }
        };
        let count = parts.iter().map(|part| part.count).sum::<u64>();
        (count > 0 && count <= limits::ACQUIRE_CHUNKS_MAX).then_some(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_covered_with_the_fewest_chunks() {
        let ladder = Ladder::standard();
        let parts = ladder.cover(Bytes::mib(2 * 256 + 3 * 32 + 5), Shape::Largest).unwrap();
        let counts: Vec<_> = parts.iter().map(|part| (part.len.get() >> 20, part.count)).collect();
        assert_eq!(counts, [(256, 2), (32, 3), (2, 3)]);
        let parts = ladder.cover(Bytes::mib(5), Shape::Uniform(Bytes::mib(2))).unwrap();
        assert_eq!(parts, [Part { len: Bytes::mib(2), count: 3 }]);
        let parts = ladder.cover(Bytes::mib(5), Shape::Uniform(Bytes::mib(3))).unwrap();
        assert_eq!(parts, [Part { len: Bytes::mib(32), count: 1 }]);
    }

    #[test]
    fn nothing_and_too_much_are_not_covered() {
        let ladder = Ladder::standard();
        assert_eq!(ladder.cover(Bytes::ZERO, Shape::Largest), None);
        assert_eq!(ladder.cover(Bytes::MAX, Shape::Largest), None);
        assert_eq!(ladder.cover(Bytes::gib(1024), Shape::Uniform(Bytes::mib(2))), None);
    }

    #[test]
    fn steps_that_make_no_ladder_are_named() {
        let mib = |steps: &[u64]| Ladder::new(steps.iter().map(|n| Bytes::mib(*n)).collect());
        assert!(mib(&[2, 32, 256]).is_ok());
        assert_eq!(mib(&[]), Err(LadderError::Empty));
        assert!(matches!(mib(&[3]), Err(LadderError::NotAStep { .. })));
        assert!(matches!(mib(&[2, 2]), Err(LadderError::NotAStep { .. })));
        assert!(matches!(mib(&[32, 2]), Err(LadderError::NotAStep { .. })));
        assert!(matches!(mib(&[2, 8192]), Err(LadderError::TooLarge(_))));
    }
}
