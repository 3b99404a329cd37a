//! Reads pickles, Python's own format for data, of protocols 2 to 5 with opcodes that build data. What would call a function, import a module or make an
//! object of a class is refused where it stands.
//!
//! Not for: what the data means. Byte strings and whole numbers beyond 64 bits are passed over; sets are read as lists; what follows the end of the
//! pickle is not looked at, as in Python.
//!
//! Invariants: nothing here calls itself, so no nesting is too deep; a file has at most one value for two of its bytes and one container for eight, and keeps
//! a value once, so that memory stays below 64 times its length whatever is in it ([`PickleFault::Dense`]: of ten real snapshots the densest has a value in 2.6 bytes and a container in 16); a value that
//! a file mentions many times is there once; where that much memory cannot be had it is an error like any other.

/// A value: small ones as they are, the others as their number in the [`Pickle`] that they came with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value {
    /// Python's `None`.
    None,
    /// Yes or no.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number from 2⁶³ on.
    Large(u64),
    /// A fraction.
    Float(f64),
    /// Text, for [`Pickle::text`].
    Text(u32),
    /// A list or a set, for [`Pickle::items`].
    List(u32),
    /// A tuple, for [`Pickle::items`].
    Tuple(u32),
    /// A dictionary, for [`Pickle::entries`].
    Dict(u32),
    /// Data that is not kept: a byte string, or a whole number beyond 64 bits.
    Other,
}

const _: () = assert!(size_of::<Option<Value>>() == 16);

/// Why a pickle could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("byte {at}: {fault}")]
pub struct PickleError {
    /// Where the opcode stands that cannot be followed, from the start of the file.
    pub at: usize,
    /// What is wrong with it.
    pub fault: PickleFault,
}

/// What is wrong with an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PickleFault {
    /// The file is cut.
    #[error("the file ends {missing} bytes too early")]
    End {
        /// How many more this opcode needs.
        missing: u64,
    },
    /// No pickle of protocol 2 or later begins like this.
    #[error("this is not how a pickle begins")]
    Start,
    /// A protocol from the future.
    #[error("protocol {0} is not known; 2 to 5 are")]
    Protocol(u8),
    /// The opcode does more than build data.
    #[error("{0} would run code, and only data is read")]
    Code(&'static str),
    /// An opcode of the first protocols, which wrote numbers as text.
    #[error("{0} is an opcode of protocol 0; only those of 2 to 5 are read")]
    Textual(&'static str),
    /// An opcode that nobody knows.
    #[error("there is no opcode {0:#04x}")]
    Unknown(u8),
    /// It takes a value from an empty stack.
    #[error("a value is missing on the stack")]
    Stack,
    /// It takes what lies above a mark, and there is none.
    #[error("a mark is missing on the stack")]
    Mark,
    /// It adds to something that takes no such thing.
    #[error("there is no {0} to add to")]
    Target(&'static str),
    /// It sets keys and values, one too few.
    #[error("a key without a value")]
    Odd,
    /// It asks for something that was never put away.
    #[error("nothing was kept under number {0}")]
    Get(u32),
    /// It puts something away under a number that no writer would have come to.
    #[error("number {0} is higher than a file of this length can have")]
    Put(u32),
    /// A length below zero.
    #[error("a length of {0}")]
    Length(i32),
    /// It builds more than any writer would in as many bytes.
    #[error("more {0} than a file of this length can have")]
    Dense(&'static str),
    /// The machine, or a limit of the process (`ulimit -v`), has not as much memory as the file needs.
    #[error("there is no memory for {0} more values")]
    Memory(usize),
    /// More than numbers of 32 bits can tell apart.
    #[error("more values than can be told apart")]
    Many,
}

/// What a pickle holds.
#[derive(Debug)]
pub struct Pickle<'a> {
    texts: Vec<&'a [u8]>,
    lists: Vec<Vec<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    root: Value,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle that `bytes` begin with. What dictionaries hold under one of the keys `passed_over` is not kept: a list there loses its items,
    /// even where something else mentions it, too.
    pub fn read(bytes: &'a [u8], passed_over: &[&str]) -> Result<Pickle<'a>, PickleError> {
        let pickle = Pickle { texts: Vec::new(), lists: Vec::new(), dicts: Vec::new(), root: Value::None };
        let (stack, marks, memo) = (Vec::new(), Vec::new(), Vec::new());
        let machine = Machine { bytes, next: 0, at: 0, stack, marks, memo, kept: 0, built: 0, passed_over, pickle };
        machine.run()
    }

    /// True for the first bytes of a pickle of protocol 2 or later.
    pub fn begins_with(head: &[u8]) -> bool {
        matches!(head, [PROTO, 0..=PROTOCOL_MAX, ..])
    }

    /// What everything else is in.
    pub fn root(&self) -> Value {
        self.root
    }

    /// The bytes of a text: UTF-8 as a rule, though Python also writes half characters; `None` for anything else.
    pub fn text(&self, value: Value) -> Option<&'a [u8]> {
        let Value::Text(text) = value else { return None };
        self.texts.get(text as usize).copied()
    }

    /// The items of a list or tuple; `None` for anything else.
    pub fn items(&self, value: Value) -> Option<&[Value]> {
        let (Value::List(list) | Value::Tuple(list)) = value else { return None };
        self.lists.get(list as usize).map(Vec::as_slice)
    }

    /// The keys of a dictionary with their values, in the order in which they were set; a key may come twice, and then the last counts. `None` for
    /// anything else.
    pub fn entries(&self, value: Value) -> Option<&[(Value, Value)]> {
        let Value::Dict(dict) = value else { return None };
        self.dicts.get(dict as usize).map(Vec::as_slice)
    }

    /// How many lists, tuples and dictionaries there are: their numbers are below.
    pub fn containers(&self) -> usize {
        self.lists.len().max(self.dicts.len())
    }
}

const PROTO: u8 = 0x80;
const PROTOCOL_MAX: u8 = 5;
/// Anything may be as small as this.
const DENSE_FREE: usize = 4096;
/// A value takes a byte for what it is and one for what it says, or stands under a key.
const BYTES_PER_VALUE: usize = 2;
/// A container takes three bytes to make and to keep, and those of what is in it.
const BYTES_PER_CONTAINER: usize = 8;

struct Machine<'a, 'k> {
    bytes: &'a [u8],
    /// Where the next byte is read.
    next: usize,
    /// Where the opcode stands.
    at: usize,
    stack: Vec<Value>,
    /// How high the stack was at each mark.
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    /// How many places of the memo are taken.
    kept: usize,
    /// How many values were put on the stack, ever.
    built: usize,
    passed_over: &'k [&'k str],
    pickle: Pickle<'a>,
}

impl<'a> Machine<'a, '_> {
    fn run(mut self) -> Result<Pickle<'a>, PickleError> {
        if self.bytes.first() != Some(&PROTO) {
            return Err(self.fault(PickleFault::Start));
        }
        loop {
            self.at = self.next;
            let opcode = self.byte()?;
            if opcode == b'.' {
                self.pickle.root = self.pop()?;
                return Ok(self.pickle);
            }
            self.follow(opcode)?;
        }
    }

    fn fault(&self, fault: PickleFault) -> PickleError {
        PickleError { at: self.at, fault }
    }

    /// The names are those of Python's `pickletools`.
    fn follow(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            PROTO => match self.byte()? {
                0..=PROTOCOL_MAX => {}
                newer => return Err(self.fault(PickleFault::Protocol(newer))),
            },
            // FRAME: a hint for who reads piece by piece, and a promise of so many bytes.
            0x95 => self.frame()?,
            b'(' => self.mark()?,
            // POP, POP_MARK, DUP
            b'0' if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_marked()?),
            b'2' => {
                let top = self.top()?;
                self.push(top)?;
            }
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            b'J' | b'K' | b'M' | 0x8a | 0x8b => {
                let whole = self.whole(opcode)?;
                self.push(whole)?;
            }
            b'G' => {
                let float = f64::from_be_bytes(self.array()?);
                self.push(Value::Float(float))?;
            }
            // BINUNICODE, BINUNICODE8, BINSTRING, BINBYTES, BINBYTES8 and BYTEARRAY8, each with its SHORT one
            0x8c | b'X' | 0x8d | b'U' | b'T' | b'C' | b'B' | 0x8e | 0x96 => self.string(opcode)?,
            // EMPTY_LIST, EMPTY_SET, EMPTY_TUPLE, EMPTY_DICT
            b']' | 0x8f => self.push_list(Value::List, Vec::new())?,
            b')' => self.push_list(Value::Tuple, Vec::new())?,
            b'}' => self.push_dict(Vec::new())?,
            // LIST, TUPLE, FROZENSET, DICT, TUPLE1, TUPLE2, TUPLE3
            b'l' | b't' | 0x91 | b'd' | 0x85..=0x87 => self.gather(opcode)?,
            // APPEND, APPENDS, ADDITEMS, SETITEM, SETITEMS
            b'a' | b'e' | 0x90 | b's' | b'u' => self.add(opcode)?,
            // BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
            b'q' | b'r' | 0x94 => self.put(opcode)?,
            b'h' | b'j' => self.get(opcode)?,
            _ => return Err(self.fault(refusal(opcode))),
        }
        Ok(())
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], PickleError> {
        let left = self.bytes.get(self.next..).unwrap_or_default();
        let taken = usize::try_from(len).ok().and_then(|len| left.get(..len));
        let taken = taken.ok_or_else(|| self.fault(PickleFault::End { missing: len - left.len() as u64 }))?;
        self.next += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        Ok(self.take(N as u64)?.try_into().expect("as many bytes as were asked for"))
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn frame(&mut self) -> Result<(), PickleError> {
        let len = u64::from_le_bytes(self.array()?);
        let left = (self.bytes.len() - self.next) as u64;
        if len > left {
            return Err(self.fault(PickleFault::End { missing: len - left }));
        }
        Ok(())
    }

    /// A length that Python writes with a sign.
    fn signed_len(&mut self) -> Result<u64, PickleError> {
        let len = i32::from_le_bytes(self.array()?);
        u64::try_from(len).map_err(|_| self.fault(PickleFault::Length(len)))
    }

    fn whole(&mut self, opcode: u8) -> Result<Value, PickleError> {
        Ok(match opcode {
            // BININT, BININT1, BININT2
            b'J' => Value::Int(i32::from_le_bytes(self.array()?).into()),
            b'K' => Value::Int(self.byte()?.into()),
            b'M' => Value::Int(u16::from_le_bytes(self.array()?).into()),
            // LONG1, LONG4
            0x8a => {
                let len = self.byte()?;
                long(self.take(len.into())?)
            }
            _ => {
                let len = self.signed_len()?;
                long(self.take(len)?)
            }
        })
    }

    fn string(&mut self, opcode: u8) -> Result<(), PickleError> {
        let len = match opcode {
            0x8c | b'U' | b'C' => self.byte()?.into(),
            b'X' | b'B' => u32::from_le_bytes(self.array()?).into(),
            b'T' => self.signed_len()?,
            _ => u64::from_le_bytes(self.array()?),
        };
        let bytes = self.take(len)?;
        let value = match opcode {
            b'C' | b'B' | 0x8e | 0x96 => Value::Other,
            _ => Value::Text(self.number(self.pickle.texts.len())?),
        };
        if value != Value::Other {
            self.pickle.texts.push(bytes);
        }
        self.push(value)
    }

    fn number(&self, count: usize) -> Result<u32, PickleError> {
        u32::try_from(count).map_err(|_| self.fault(PickleFault::Many))
    }

    fn push_list(&mut self, value: fn(u32) -> Value, items: Vec<Value>) -> Result<(), PickleError> {
        let value = value(self.number(self.pickle.lists.len())?);
        self.container()?;
        self.pickle.lists.push(items);
        self.push(value)
    }

    fn push_dict(&mut self, entries: Vec<(Value, Value)>) -> Result<(), PickleError> {
        let value = Value::Dict(self.number(self.pickle.dicts.len())?);
        self.container()?;
        self.pickle.dicts.push(entries);
        self.push(value)
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        self.built += 1;
        if self.built > DENSE_FREE + self.bytes.len() / BYTES_PER_VALUE {
            return Err(self.fault(PickleFault::Dense("values")));
        }
        self.stack.try_reserve(1).map_err(|_| self.fault(PickleFault::Memory(1)))?;
        self.stack.push(value);
        Ok(())
    }

    fn mark(&mut self) -> Result<(), PickleError> {
        if self.marks.len() >= DENSE_FREE + self.bytes.len() / BYTES_PER_CONTAINER {
            return Err(self.fault(PickleFault::Dense("marks")));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// One more is to be made.
    fn container(&self) -> Result<(), PickleError> {
        let made = self.pickle.lists.len() + self.pickle.dicts.len();
        if made >= DENSE_FREE + self.bytes.len() / BYTES_PER_CONTAINER {
            return Err(self.fault(PickleFault::Dense("lists and dictionaries")));
        }
        Ok(())
    }

    /// Where the part of the stack begins that an opcode without a mark may use.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Value, PickleError> {
        let above = self.stack.get(self.floor()..).unwrap_or_default();
        above.last().copied().ok_or_else(|| self.fault(PickleFault::Stack))
    }

    fn pop(&mut self) -> Result<Value, PickleError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// Everything above the last mark, which goes with it.
    fn pop_marked(&mut self) -> Result<Vec<Value>, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| self.fault(PickleFault::Mark))?;
        let (mut marked, count) = (Vec::new(), self.stack.len() - mark);
        marked.try_reserve_exact(count).map_err(|_| self.fault(PickleFault::Memory(count)))?;
        marked.extend(self.stack.drain(mark..));
        Ok(marked)
    }

    fn gather(&mut self, opcode: u8) -> Result<(), PickleError> {
        if let 0x85..=0x87 = opcode {
            let mut items = Vec::with_capacity(3);
            for _ in 0x85..=opcode {
                items.push(self.pop()?);
            }
            items.reverse();
            return self.push_list(Value::Tuple, items);
        }
        let items = self.pop_marked()?;
        match opcode {
            b'd' => {
                self.push_dict(Vec::new())?;
                self.set(&items)
            }
            b't' => self.push_list(Value::Tuple, items),
            _ => self.push_list(Value::List, items),
        }
    }

    fn add(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(&[key, value])
            }
            b'u' => {
                let items = self.pop_marked()?;
                self.set(&items)
            }
            _ => {
                let items = self.pop_marked()?;
                self.append(&items)
            }
        }
    }

    /// Adds to the list on top of the stack.
    fn append(&mut self, items: &[Value]) -> Result<(), PickleError> {
        let top = self.top()?;
        let list = match top {
            Value::List(list) => self.pickle.lists.get_mut(list as usize),
            _ => None,
        };
        let Some(list) = list else { return Err(self.fault(PickleFault::Target("list"))) };
        if list.try_reserve(items.len()).is_err() {
            return Err(self.fault(PickleFault::Memory(items.len())));
        }
        list.extend_from_slice(items);
        Ok(())
    }

    /// Sets keys and values, by turns, in the dictionary on top of the stack.
    fn set(&mut self, items: &[Value]) -> Result<(), PickleError> {
        let top = self.top()?;
        let (pairs, odd) = items.as_chunks::<2>();
        if !odd.is_empty() {
            return Err(self.fault(PickleFault::Odd));
        }
        let Pickle { texts, lists, dicts, .. } = &mut self.pickle;
        let dict = match top {
            Value::Dict(dict) => dicts.get_mut(dict as usize),
            _ => None,
        };
        let Some(dict) = dict else { return Err(self.fault(PickleFault::Target("dictionary"))) };
        let is_passed_over = |key: Value| {
            let Value::Text(key) = key else { return false };
            texts.get(key as usize).is_some_and(|text| self.passed_over.iter().any(|key| key.as_bytes() == *text))
        };
        if dict.is_empty() {
            dict.reserve_exact(pairs.iter().filter(|[key, _]| !is_passed_over(*key)).count());
        }
        for &[key, value] in pairs {
            if !is_passed_over(key) {
                dict.push((key, value));
            } else if let Value::List(list) | Value::Tuple(list) = value
                && let Some(list) = lists.get_mut(list as usize)
            {
                *list = Vec::new();
            }
        }
        Ok(())
    }

    fn put(&mut self, opcode: u8) -> Result<(), PickleError> {
        let number = match opcode {
            b'q' => self.byte()?.into(),
            b'r' => u32::from_le_bytes(self.array()?),
            _ => self.number(self.kept)?,
        };
        let place = number as usize;
        // Writers count from 0 or 1, and keep a value once.
        if place > self.built {
            return Err(self.fault(PickleFault::Put(number)));
        }
        let top = self.top()?;
        if place >= self.memo.len() {
            self.memo.resize(place + 1, None);
        }
        let kept = self.memo.get_mut(place).expect("it was made long enough");
        self.kept += usize::from(kept.is_none());
        *kept = Some(top);
        Ok(())
    }

    fn get(&mut self, opcode: u8) -> Result<(), PickleError> {
        let number = match opcode {
            b'h' => self.byte()?.into(),
            _ => u32::from_le_bytes(self.array()?),
        };
        let kept = self.memo.get(number as usize).copied().flatten();
        let kept = kept.ok_or_else(|| self.fault(PickleFault::Get(number)))?;
        self.push(kept)
    }
}

/// Why an opcode is not followed.
fn refusal(opcode: u8) -> PickleFault {
    match opcode {
        b'c' => PickleFault::Code("GLOBAL"),
        0x93 => PickleFault::Code("STACK_GLOBAL"),
        b'R' => PickleFault::Code("REDUCE"),
        b'b' => PickleFault::Code("BUILD"),
        b'i' => PickleFault::Code("INST"),
        b'o' => PickleFault::Code("OBJ"),
        0x81 => PickleFault::Code("NEWOBJ"),
        0x92 => PickleFault::Code("NEWOBJ_EX"),
        b'P' => PickleFault::Code("PERSID"),
        b'Q' => PickleFault::Code("BINPERSID"),
        0x82 => PickleFault::Code("EXT1"),
        0x83 => PickleFault::Code("EXT2"),
        0x84 => PickleFault::Code("EXT4"),
        0x97 => PickleFault::Code("NEXT_BUFFER"),
        0x98 => PickleFault::Code("READONLY_BUFFER"),
        b'I' => PickleFault::Textual("INT"),
        b'L' => PickleFault::Textual("LONG"),
        b'F' => PickleFault::Textual("FLOAT"),
        b'S' => PickleFault::Textual("STRING"),
        b'V' => PickleFault::Textual("UNICODE"),
        b'p' => PickleFault::Textual("PUT"),
        b'g' => PickleFault::Textual("GET"),
        other => PickleFault::Unknown(other),
    }
}

/// A whole number of any length: two's complement, lowest byte first.
fn long(bytes: &[u8]) -> Value {
    let is_negative = bytes.last().is_some_and(|last| *last >= 0x80);
    let fill = if is_negative { 0xff } else { 0 };
    let used = bytes.iter().rposition(|byte| *byte != fill).map_or(0, |last| last + 1);
    let mut word = [fill; 8];
    match (word.get_mut(..used), bytes.get(..used)) {
        (Some(low), Some(used)) => low.copy_from_slice(used),
        _ => return Value::Other,
    }
    match (i64::from_le_bytes(word), is_negative) {
        (number @ 0.., false) | (number @ ..0, true) => Value::Int(number),
        (_, false) => Value::Large(u64::from_le_bytes(word)),
        (_, true) => Value::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::super::written::{Node, pickle};
    use super::*;

    fn read(bytes: &[u8]) -> Result<Pickle<'_>, PickleError> {
        Pickle::read(bytes, &["frames"])
    }

    /// The values of the list that `code` builds, in a pickle of protocol 4.
    fn items(code: &[u8]) -> Vec<Value> {
        let bytes = [b"\x80\x04(", code, b"l."].concat();
        let pickle = read(&bytes).unwrap();
        pickle.items(pickle.root()).unwrap().to_vec()
    }

    #[test]
    fn what_python_writes_is_read_in_every_protocol() {
        let node = Node::Dict(vec![
            ("none", Node::None),
            ("yes", Node::Bool(true)),
            ("numbers", Node::List([0, 255, 256, 65_536, -1, 1 << 31, i64::MAX, i64::MIN].map(Node::Int).into())),
            ("large", Node::Large(u64::MAX)),
            ("half", Node::Float(0.5)),
            ("pair", Node::Tuple(vec![Node::Int(1), Node::text("none")])),
            ("three", Node::Tuple(vec![Node::Int(1); 3])),
            ("long", Node::Text("x".repeat(300))),
        ]);
        for protocol in [2, 4, 5] {
            let bytes = pickle(&node, protocol);
            let pickle = read(&bytes).unwrap();
            let entries = pickle.entries(pickle.root()).unwrap();
            let keys: Vec<_> = entries.iter().map(|(key, _)| pickle.text(*key).unwrap()).collect();
            assert_eq!(keys, [&b"none"[..], b"yes", b"numbers", b"large", b"half", b"pair", b"three", b"long"]);
            let values: Vec<Value> = entries.iter().map(|(_, value)| *value).collect();
            assert_eq!(values[..2], [Value::None, Value::Bool(true)]);
            let numbers = [0, 255, 256, 65_536, -1, 1 << 31, i64::MAX, i64::MIN].map(Value::Int);
            assert_eq!(pickle.items(values[2]).unwrap(), numbers);
            assert_eq!(values[3..5], [Value::Large(u64::MAX), Value::Float(0.5)]);
            let pair = pickle.items(values[5]).unwrap();
            assert_eq!((pair[0], pickle.text(pair[1])), (Value::Int(1), Some(&b"none"[..])));
            assert_eq!(pickle.items(values[6]).unwrap(), [Value::Int(1); 3]);
            assert_eq!(pickle.text(values[7]).unwrap().len(), 300);
        }
    }

    #[test]
    fn long_numbers_are_read_up_to_64_bits() {
        let cases: [(&[u8], Value); 11] = [
            (b"\x8a\x00", Value::Int(0)),
            (b"\x8a\x01\xff", Value::Int(-1)),
            (b"\x8a\x02\xff\x00", Value::Int(255)),
            (b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", Value::Int(i64::MAX)),
            (b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80", Value::Int(i64::MIN)),
            (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00", Value::Large(1 << 63)),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00", Value::Large(u64::MAX)),
            (b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01", Value::Other),
            (b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff", Value::Other),
            (b"\x8b\x03\x00\x00\x00\x01\x00\x00", Value::Int(1)),
            (b"\x8b\x0a\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", Value::Int(-1)),
        ];
        for (code, expected) in cases {
            assert_eq!(items(code), [expected], "{code:?}");
        }
    }

    #[test]
    fn opcodes_that_python_writes_elsewhere_build_data_too() {
        assert_eq!(items(b"C\x02abB\x01\0\0\0c\x8e\x01\0\0\0\0\0\0\0d\x96\x01\0\0\0\0\0\0\0e"), [Value::Other; 4]);
        let text = [b"U\x01aT\x01\0\0\0bX\x01\0\0\0c".as_slice(), b"\x8d\x01\0\0\0\0\0\0\0d\x8c\x01e"].concat();
        assert_eq!(items(&text), [0, 1, 2, 3, 4].map(Value::Text));
        // DUP, POP, POP_MARK, and POP of a mark.
        assert_eq!(items(b"K\x012K\x020(K\x031(0N"), [Value::Int(1), Value::Int(1), Value::None]);
        assert_eq!(items(b")\x8f(\x91"), [Value::Tuple(0), Value::List(1), Value::List(2)]);
        let bytes = b"\x80\x02\x8f(NN\x90(K\x01K\x02d\x85\x86.";
        let pickle = read(bytes).unwrap();
        let [set, tuple] = *pickle.items(pickle.root()).unwrap() else { panic!("two") };
        assert_eq!(pickle.items(set).unwrap(), [Value::None; 2]);
        let [dict] = *pickle.items(tuple).unwrap() else { panic!("one") };
        assert_eq!(pickle.entries(dict).unwrap(), [(Value::Int(1), Value::Int(2))]);
    }

    #[test]
    fn what_is_mentioned_twice_is_there_once_and_a_list_may_hold_itself() {
        let values = items(b"]\x94h\0h\0");
        assert_eq!(values, [Value::List(0); 3]);
        let pickle = read(b"\x80\x04]\x94h\0a.").unwrap();
        assert_eq!(pickle.items(pickle.root()).unwrap(), [pickle.root()]);
    }

    #[test]
    fn what_is_passed_over_is_not_kept() {
        let stack = Node::List(vec![Node::Int(1); 5]);
        let bytes = pickle(&Node::Dict(vec![("a", Node::None), ("frames", stack.clone()), ("b", stack)]), 4);
        let pickle = read(&bytes).unwrap();
        let entries = pickle.entries(pickle.root()).unwrap();
        assert_eq!(entries.len(), 2);
        assert_eq!(pickle.items(entries[1].1).unwrap().len(), 5);
        assert_eq!(pickle.lists.iter().map(Vec::len).sum::<usize>(), 5);
    }

    #[test]
    fn what_cannot_be_followed_is_named_with_its_byte() {
        let cases: [(&[u8], &str); 29] = [
            (b"", "byte 0: this is not how a pickle begins"),
            (b"(lp0\n.", "byte 0: this is not how a pickle begins"),
            (b"\x80", "byte 0: the file ends 1 bytes too early"),
            (b"\x80\x06N.", "byte 0: protocol 6 is not known"),
            (b"\x80\x04", "byte 2: the file ends 1 bytes too early"),
            (b"\x80\x04N", "byte 3: the file ends 1 bytes too early"),
            (b"\x80\x04.", "byte 2: a value is missing on the stack"),
            (b"\x80\x04cos\nsystem\n.", "byte 2: GLOBAL would run code"),
            (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "byte 14: STACK_GLOBAL would run code"),
            (b"\x80\x04N)R.", "byte 4: REDUCE would run code"),
            (b"\x80\x04N)\x81.", "byte 4: NEWOBJ would run code"),
            (b"\x80\x04N}b.", "byte 4: BUILD would run code"),
            (b"\x80\x04Q.", "byte 2: BINPERSID would run code"),
            (b"\x80\x04\x82\x01.", "byte 2: EXT1 would run code"),
            (b"\x80\x02I1\n.", "byte 2: INT is an opcode of protocol 0"),
            (b"\x80\x04\xff.", "byte 2: there is no opcode 0xff"),
            (b"\x80\x04X\xff\xff\xff\xffab", "byte 2: the file ends 4294967293 bytes too early"),
            (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "byte 2: the file ends 18446744073709551615 bytes too"),
            (b"\x80\x04\x95\x09\0\0\0\0\0\0\0N.", "byte 2: the file ends 7 bytes too early"),
            (b"\x80\x04\x8b\xff\xff\xff\xff.", "byte 2: a length of -1"),
            (b"\x80\x04Na.", "byte 3: a value is missing on the stack"),
            (b"\x80\x04NNa.", "byte 4: there is no list to add to"),
            (b"\x80\x04]NNs.", "byte 5: there is no dictionary to add to"),
            (b"\x80\x04}(Nu.", "byte 5: a key without a value"),
            (b"\x80\x04Nt.", "byte 3: a mark is missing on the stack"),
            (b"\x80\x04N(\x85.", "byte 4: a value is missing on the stack"),
            (b"\x80\x04h\x03.", "byte 2: nothing was kept under number 3"),
            (b"\x80\x04Nr\xff\xff\xff\xff.", "byte 3: number 4294967295 is higher"),
            (b"\x80\x04(\x94.", "byte 3: a value is missing on the stack"),
        ];
        for (bytes, expected) in cases {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{} gives {error:?}, not {expected:?}", bytes.escape_ascii());
        }
    }

    #[test]
    fn a_pickle_cut_anywhere_is_an_error() {
        let entries = (0..20).map(|n| Node::Tuple(vec![Node::Int(n * 10_000), Node::Text(format!("text {n}"))]));
        for protocol in [2, 4] {
            let bytes = pickle(&Node::List(entries.clone().collect()), protocol);
            for len in 0..bytes.len() {
                assert!(read(&bytes[..len]).is_err(), "{len} of {}", bytes.len());
            }
        }
    }

    #[test]
    fn more_values_than_writers_make_of_so_many_bytes_are_refused() {
        let cases: [(&[u8], usize, &str); 6] = [
            (b"(", 3 + 4096 + 12_500, "marks"),
            (b"N", 2 + 4096 + 50_000, "values"),
            (b"2", 2 + 4096 + 50_000, "values"),
            (b"]", 2 + 4096 + 12_500, "lists and dictionaries"),
            (b"}", 2 + 4096 + 12_500, "lists and dictionaries"),
            (b"\x85", 2 + 4096 + 12_500, "lists and dictionaries"),
        ];
        for (code, at, what) in cases {
            // 100 000 bytes and one for the value that the others are made of.
            let bytes = [b"\x80\x04N", &code.repeat(100_000 - 4)[..], b"."].concat();
            let error = read(&bytes).unwrap_err();
            assert_eq!(error.fault, PickleFault::Dense(what), "{}", code.escape_ascii());
            assert!(error.at.abs_diff(at) <= 1, "byte {} and not {at} of {}", error.at, code.escape_ascii());
        }
        // The same value kept again and again.
        let bytes = [b"\x80\x04N", &[0x94; 100][..], b"."].concat();
        assert_eq!(read(&bytes).unwrap_err().fault, PickleFault::Put(2));
    }

    #[test]
    fn nesting_a_million_deep_is_read_like_anything_else() {
        // As many bytes as a writer would take: a number comes and goes at each depth.
        let bytes = [b"\x80\x04", &b"]M\0\x01M\0\x0100"[..].repeat(1 << 20)[..], &[b'a'; (1 << 20) - 1], b"."].concat();
        let pickle = read(&bytes).unwrap();
        let mut depth = 0;
        let mut inner = pickle.root();
        while let Some([item]) = pickle.items(inner) {
            (inner, depth) = (*item, depth + 1);
        }
        assert_eq!(depth, (1 << 20) - 1);
    }
}
