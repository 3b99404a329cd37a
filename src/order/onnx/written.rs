//! Parts of models as protobuf writes them, for tests of whoever reads them.

/// A number as protobuf writes it.
fn varint(mut number: u64, into: &mut Vec<u8>) {
    while number >= 128 {
        into.push(number as u8 | 128);
        number >>= 7;
    }
    into.push(number as u8);
}

/// A field of bytes.
pub(crate) fn field(field: u64, contents: &[u8]) -> Vec<u8> {
    let mut written = Vec::new();
    varint(field << 3 | 2, &mut written);
    varint(contents.len() as u64, &mut written);
    written.extend_from_slice(contents);
    written
}

/// A field that is a number.
pub(crate) fn number(field: u64, number: u64) -> Vec<u8> {
    let mut written = Vec::new();
    varint(field << 3, &mut written);
    varint(number, &mut written);
    written
}

/// A tensor with its type and shape; what is no number is the name of a dimension.
pub(crate) fn value(of: u64, name: &str, elements: u64, dims: &[&str]) -> Vec<u8> {
    let dim = |dim: &&str| match dim.parse() {
        Ok(size) => field(1, &number(1, size)),
        Err(_) => field(1, &field(2, dim.as_bytes())),
    };
    let shape: Vec<u8> = dims.iter().flat_map(dim).collect();
    let tensor = [number(1, elements), field(2, &shape)].concat();
    field(of, &[field(1, name.as_bytes()), field(2, &field(1, &tensor))].concat())
}

/// An operator of a graph.
pub(crate) fn node(op: &str, name: &str, inputs: &[&str], outputs: &[&str]) -> Vec<u8> {
    let mut node: Vec<u8> = inputs.iter().flat_map(|input| field(1, input.as_bytes())).collect();
    node.extend(outputs.iter().flat_map(|output| field(2, output.as_bytes())));
    field(1, &[node, field(3, name.as_bytes()), field(4, op.as_bytes())].concat())
}
