//! Writes small pickles as Python does, and small snapshots as PyTorch does, for whoever tests the readers of both.
//!
//! Not for: anything beyond tests. It knows nothing of the readers, so that both can be wrong only by themselves.

use std::collections::HashMap;

/// Something to write.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Large(u64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Tuple(Vec<Node>),
    Dict(Vec<(&'static str, Node)>),
}

impl Node {
    pub(crate) fn text(text: &str) -> Node {
        Node::Text(text.to_owned())
    }
}

/// A pickle of protocol 2, 4 or 5. A text is written once and then mentioned, everything else is put away and never mentioned, as with Python.
pub(crate) fn pickle(node: &Node, protocol: u8) -> Vec<u8> {
    let mut pickler = Pickler { protocol, bytes: Vec::new(), texts: HashMap::new(), kept: 0 };
    pickler.write(node);
    pickler.bytes.push(b'.');
    let mut bytes = vec![0x80, protocol];
    if protocol >= 4 {
        bytes.push(0x95);
        bytes.extend((pickler.bytes.len() as u64).to_le_bytes());
    }
    bytes.extend(pickler.bytes);
    bytes
}

struct Pickler {
    protocol: u8,
    bytes: Vec<u8>,
    texts: HashMap<String, u32>,
    kept: u32,
}

impl Pickler {
    fn write(&mut self, node: &Node) {
        match node {
            Node::None => self.bytes.push(b'N'),
            Node::Bool(yes) => self.bytes.push(if *yes { 0x88 } else { 0x89 }),
            Node::Int(number) => self.write_int(*number),
            Node::Large(number) => {
                self.bytes.extend([0x8a, 9]);
                self.bytes.extend(number.to_le_bytes());
                self.bytes.push(0);
            }
            Node::Float(number) => {
                self.bytes.push(b'G');
                self.bytes.extend(number.to_be_bytes());
            }
            Node::Text(text) => self.write_text(text),
            Node::List(items) => {
                self.bytes.push(b']');
                self.keep();
                self.write_all(items, *b"ae");
            }
            Node::Tuple(items) => {
                if items.len() != 2 {
                    self.bytes.push(b'(');
                }
                items.iter().for_each(|item| self.write(item));
                self.bytes.push(if items.len() == 2 { 0x86 } else { b't' });
                self.keep();
            }
            Node::Dict(entries) => {
                self.bytes.push(b'}');
                self.keep();
                let mark = entries.len() > 1;
                self.bytes.extend(mark.then_some(b'('));
                for (key, value) in entries {
                    self.write_text(key);
                    self.write(value);
                }
                let code = if mark { Some(b'u') } else { entries.first().map(|_| b's') };
                self.bytes.extend(code);
            }
        }
    }

    /// Items and the opcode that adds them: another for one alone.
    fn write_all(&mut self, items: &[Node], [one, many]: [u8; 2]) {
        match items {
            [] => {}
            [item] => {
                self.write(item);
                self.bytes.push(one);
            }
            items => {
                self.bytes.push(b'(');
                items.iter().for_each(|item| self.write(item));
                self.bytes.push(many);
            }
        }
    }

    fn write_int(&mut self, number: i64) {
        if let Ok(byte) = u8::try_from(number) {
            self.bytes.extend([b'K', byte]);
        } else if let Ok(short) = u16::try_from(number) {
            self.bytes.push(b'M');
            self.bytes.extend(short.to_le_bytes());
        } else if let Ok(word) = i32::try_from(number) {
            self.bytes.push(b'J');
            self.bytes.extend(word.to_le_bytes());
        } else {
            self.bytes.extend([0x8a, 8]);
            self.bytes.extend(number.to_le_bytes());
        }
    }

    fn write_text(&mut self, text: &str) {
        if let Some(number) = self.texts.get(text) {
            match u8::try_from(*number) {
                Ok(byte) => self.bytes.extend([b'h', byte]),
                Err(_) => {
                    self.bytes.push(b'j');
                    self.bytes.extend(number.to_le_bytes());
                }
            }
            return;
        }
        self.texts.insert(text.to_owned(), self.kept);
        match u8::try_from(text.len()) {
            Ok(len) if self.protocol >= 4 => self.bytes.extend([0x8c, len]),
            _ => {
                self.bytes.push(b'X');
                self.bytes.extend((text.len() as u32).to_le_bytes());
            }
        }
        self.bytes.extend(text.as_bytes());
        self.keep();
    }

    fn keep(&mut self) {
        match u8::try_from(self.kept) {
            _ if self.protocol >= 4 => self.bytes.push(0x94),
            Ok(byte) => self.bytes.extend([b'q', byte]),
            Err(_) => {
                self.bytes.push(b'r');
                self.bytes.extend(self.kept.to_le_bytes());
            }
        }
        self.kept += 1;
    }
}

/// An entry of a record: what, at which address, of how many bytes, on which stream, at which microsecond.
pub(crate) fn entry(action: &str, address: u64, size: i64, stream: i64, time: i64) -> Node {
    Node::Dict(vec![
        ("action", Node::text(action)),
        ("addr", Node::Large(address)),
        ("size", Node::Int(size)),
        ("stream", Node::Int(stream)),
        ("time_us", Node::Int(time)),
        ("frames", Node::List(vec![frame(7)])),
    ])
}

fn frame(line: i64) -> Node {
    Node::Dict(vec![("name", Node::text("forward")), ("filename", Node::text("model.py")), ("line", Node::Int(line))])
}

/// A segment with its blocks: size, as asked for, and state of each.
pub(crate) fn segment(device: i64, address: u64, stream: i64, pool: i64, blocks: &[(i64, i64, &str)]) -> Node {
    let mut next = address;
    let mut written = Vec::new();
    for (size, asked, state) in blocks {
        written.push(Node::Dict(vec![
            ("address", Node::Large(next)),
            ("size", Node::Int(*size)),
            ("requested_size", Node::Int(*asked)),
            ("state", Node::text(state)),
            ("frames", Node::List(Vec::new())),
        ]));
        next += size.unsigned_abs();
    }
    Node::Dict(vec![
        ("device", Node::Int(device)),
        ("address", Node::Large(address)),
        ("total_size", Node::Int((next - address).cast_signed())),
        ("stream", Node::Int(stream)),
        ("segment_type", Node::text("large")),
        ("segment_pool_id", Node::Tuple(vec![Node::Int(pool), Node::Int(0)])),
        ("is_expandable", Node::Bool(false)),
        ("frames", Node::List(vec![frame(9)])),
        ("blocks", Node::List(written)),
    ])
}

/// A mark of the profiler.
pub(crate) fn annotation(name: &str, stage: &str, time: i64) -> Node {
    Node::Dict(vec![
        ("name", Node::text(name)),
        ("stage", Node::text(stage)),
        ("device", Node::Int(0)),
        ("time_us", Node::Int(time)),
    ])
}

/// A whole snapshot.
pub(crate) fn snapshot(segments: Vec<Node>, records: Vec<Vec<Node>>, annotations: Vec<Node>) -> Node {
    let divisions = Node::Dict(vec![("1", Node::Int(0)), ("2", Node::Int(0)), ("256", Node::Int(4))]);
    let settings = Node::Dict(vec![
        ("PYTORCH_ALLOC_CONF", Node::text("expandable_segments:True,large_segment_size_mb:40,colour:red")),
        ("max_split_size", Node::Int(-1)),
        ("garbage_collection_threshold", Node::Float(0.8)),
        ("expandable_segments", Node::Bool(true)),
        ("pinned_num_register_threads", Node::None),
        ("roundup_power2_divisions", divisions),
    ]);
    Node::Dict(vec![
        ("segments", Node::List(segments)),
        ("device_traces", Node::List(records.into_iter().map(Node::List).collect())),
        ("allocator_settings", settings),
        ("external_annotations", Node::List(annotations)),
    ])
}
