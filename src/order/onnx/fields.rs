//! How much there is in a model, before any of it is put into memory: what is two bytes in a file may be a hundred once it is read.

use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::OrderError;
use crate::limits;

/// What is in a field.
enum Inside {
    /// Numbers, each a byte at least.
    Numbers,
    /// A message, of which these fields, by their tags, are messages or numbers.
    Fields(&'static [(u32, Inside)]),
}

use Inside::{Fields, Numbers};

const VALUE: Inside = Fields(&[(2, Fields(&[(1, Fields(&[(2, Fields(&[(1, Fields(&[]))]))]))]))]);
const GRAPH: Inside =
    Fields(&[(1, Fields(&[(5, Fields(&[]))])), (5, Fields(&[(1, Numbers)])), (11, VALUE), (12, VALUE), (13, VALUE)]);
static MODEL: Inside = Fields(&[(7, GRAPH)]);

/// Counts the fields of a model.
///
/// # Errors
///
/// There are more than [`limits::GRAPH_FIELDS_MAX`], or it is no message.
pub(super) fn check(model: &[u8]) -> Result<(), OrderError> {
    let mut left = limits::GRAPH_FIELDS_MAX;
    let counted = count(&MODEL, model, &mut left);
    let is_there = counted.map_err(|error| OrderError::Unreadable(format!("ONNX: {error}")))?;
    let most = limits::GRAPH_FIELDS_MAX;
    let too_many = || OrderError::Unreadable(format!("ONNX: there are more than {most} fields in it"));
    is_there.then_some(()).ok_or_else(too_many)
}

/// Takes the fields of a message from those that are left; says whether that was enough.
fn count(of: &Inside, mut bytes: &[u8], left: &mut u64) -> Result<bool, DecodeError> {
    let Fields(known) = of else {
        *left = left.saturating_sub(bytes.len() as u64);
        return Ok(*left > 0);
    };
    while !bytes.is_empty() {
        *left = left.saturating_sub(1);
        if *left == 0 {
            return Ok(false);
        }
        let (tag, wire) = decode_key(&mut bytes)?;
        match known.iter().find(|(known, _)| *known == tag) {
            Some((_, inner)) if wire == WireType::LengthDelimited => {
                let len = usize::try_from(decode_varint(&mut bytes)?).unwrap_or(usize::MAX);
                // What is cut off is found when it is read.
                let (part, rest) = bytes.split_at_checked(len).unwrap_or((bytes, &[]));
                if !count(inner, part, left)? {
                    return Ok(false);
                }
                bytes = rest;
            }
            _ => skip_field(wire, tag, &mut bytes, DecodeContext::default())?,
        }
    }
    Ok(true)
}
