//! Pickles that cost a reader the most for their length.

/// About a megabyte each of what costs a reader most: one opcode again and again, and as many blocks and events as fit. Only those named for events are
/// snapshots.
pub(crate) fn pickles() -> Vec<(&'static str, Vec<u8>)> {
    const LEN: usize = 1 << 20;
    let repeated =
        |start: &[u8], code: &[u8], end: &[u8]| [b"\x80\x04", start, &code.repeat(LEN / code.len()), end].concat();
    let keys = b"\x8c\x06action\x94\x8c\x04addr\x94\x8c\x04size\x94\x8c\x06stream\x94\x8c\x05alloc\x94K\x01\x940";
    let block_keys = b"\x8c\x04size\x94\x8c\x05state\x94\x8c\x10active_allocated\x94K\x01\x940";
    let open = b"}(\x8c\x08segments]\x8c\x0ddevice_traces]](".as_slice();
    let open_blocks =
        b"](}(\x8c\x06deviceK\x00\x8c\x07addressK\x01\x8c\x0atotal_sizeK\x01\x8c\x06streamK\x00\x8c\x06blocks](";
    let event = b"}(h\x00h\x04h\x01h\x05h\x02h\x05h\x03h\x05u";
    let events = [keys.as_slice(), open].concat();
    let blocks = [block_keys.as_slice(), open_blocks].concat();
    let twice = b"}(h\x00h\x04h\x01h\x05h\x02h\x05h\x03h\x05u\x94";
    vec![
        ("nothing", repeated(b"", b"N", b"")),
        ("dictionaries", repeated(b"", b"}", b"l.")),
        ("lists", repeated(b"", b"]", b".")),
        ("lists in lists", repeated(b"", b"]", &[b'a'; LEN - 1])),
        ("lists of one", repeated(b"", b"]Na", b".")),
        ("dictionaries of one", repeated(b"N\x94", b"}h\0Ns", b".")),
        ("tuples in tuples", repeated(b"N", b"\x85", b".")),
        ("marks", repeated(b"", b"(", b"N.")),
        ("copies", repeated(b"N", b"2", b".")),
        ("texts", repeated(b"", b"U\0", b".")),
        ("numbers put away", repeated(b"N", b"\x94", b".")),
        ("a list taken again and again", repeated(b"]\x94(", b"h\0", b"e.")),
        ("one entry again and again", repeated(&[&events[..], twice].concat(), b"h\x06", b"eau.")),
        ("copies of one entry", repeated(&[&events[..], event].concat(), b"2", b"eau.")),
        ("events of entries", repeated(&events, event, b"eau.")),
        ("events of blocks", repeated(&blocks, b"}(h\0h\x03h\x01h\x02u", b"eue.")),
    ]
}

/// The same as a beginning and what is repeated, to any length: nothing comes after it.
pub(crate) fn shapes() -> [(&'static str, &'static [u8], &'static [u8]); 6] {
    const EVENTS: &[u8] =
        b"\x8c\x06action\x94\x8c\x04addr\x94\x8c\x04size\x94\x8c\x06stream\x94\x8c\x05alloc\x94K\x01\x940\
        }(\x8c\x08segments]\x8c\x0ddevice_traces]](";
    [
        ("nothing", b"", b"N"),
        ("lists", b"", b"]"),
        ("tuples in tuples", b"N", b"\x85"),
        ("copies", b"N", b"2"),
        ("numbers put away", b"", b"K\x01\x94"),
        ("events", EVENTS, b"}(h\0h\x04h\x01h\x05h\x02h\x05h\x03h\x05u"),
    ]
}
