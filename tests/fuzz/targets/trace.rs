//! Trace CSV, plain and compressed, and what is made of a trace.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};

use stitchd::plan::{Plan, PlanError, format};
use stitchd::trace::{Event, EventKind, Phase, Trace, csv};

/// Longer traces are only read: planning is for whoever made the trace, and takes longer than its length.
pub(super) const PLANNED_MAX: usize = 2_000;

pub(crate) fn read(bytes: &[u8]) {
    let Ok(trace) = csv::read(bytes) else { return };
    trace.summary();
    let text = written(&trace);
    for again in [text.clone().into_bytes(), zstd(text.as_bytes()), gzip(text.as_bytes())] {
        let again = csv::read(&again[..]).expect("a trace that was read reads again");
        assert_eq!((&again.events, &again.modules), (&trace.events, &trace.modules));
    }
    if trace.events.len() <= PLANNED_MAX {
        let last = trace.iterations() - 1;
        for iteration in [0, 1, last / 2, last] {
            plan(&trace, iteration);
        }
    }
}

fn plan(trace: &Trace, iteration: u32) {
    match Plan::from_trace(trace, iteration) {
        Ok(plan) => assert_eq!(format::read(&format::write(&plan)), Ok(plan)),
        Err(error @ PlanError::Wrong { .. }) => panic!("{error:?}"),
        Err(_) => {}
    }
}

pub(super) fn written(trace: &Trace) -> String {
    let mut text =
        "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic,device,thread\n".to_owned();
    for event in &trace.events {
        write_event(&mut text, trace, event);
    }
    text
}

fn write_event(text: &mut String, trace: &Trace, event: &Event) {
    let number = |n: Option<u32>| n.map_or_else(String::new, |n| n.to_string());
    let kind = EventKind::ALL.iter().find(|(_, kind)| *kind == event.kind).expect("every kind has a name").0;
    let phase = Phase::ALL.iter().find(|(_, phase)| *phase == event.context.phase).expect("every phase has a name").0;
    let module = trace.modules[event.context.module as usize].replace('"', "\"\"");
    writeln!(
        text,
        "{},{kind},{},{},{},{},{phase},{},{},\"{module}\",{},{},{}",
        event.tick,
        event.id,
        event.bytes.get(),
        event.stream.0,
        event.iteration,
        number(event.context.microbatch),
        number(event.context.chunk),
        u8::from(event.is_dynamic),
        event.device,
        event.thread,
    )
    .expect("text takes anything");
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).expect("memory takes anything")
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut compressed = Vec::new();
    flate2::read::GzEncoder::new(bytes, flate2::Compression::fast())
        .read_to_end(&mut compressed)
        .expect("memory takes anything");
    compressed
}

const HEADER: &str = "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic\n";

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let job = format!(
        "{HEADER}\
        0,alloc,1,4096,0,0,init,,,model.weight,0\n\
        1,alloc,2,1048576,0,0,forward,0,0,model.layers.0,0\n\
        2,free,2,,0,0,backward,0,0,model.layers.0,0\n\
        3,mark,,,,0,,,,,\n\
        4,alloc,3,1048576,0,1,forward,0,0,model.layers.0,0\n\
        5,alloc,4,700,7,1,forward,1,,\"a,b\",1\n\
        5,record_stream,4,,9,1,forward,,,,\n\
        6,free,3,,0,1,backward,0,0,model.layers.0,0\n\
        7,free,4,,7,1,backward,1,,,1\n\
        8,free_completed,4,,7,1,other,,,,\n\
        9,alloc,5,512,0,1,optimizer,,,opt,0\n\
        10,alloc,6,1048576,0,2,forward,0,0,model.layers.0,0\n\
        11,free,5,,0,2,recompute,,,opt,0\n\
        12,alloc,7,512,0,2,optimizer,,,opt,0\n\
        13,free,6,,0,2,backward,,,,0\n"
    );
    let bare = "bytes,colour,event,tick,id,thread\n5,red,alloc,0,1,6\n,,enter,1,,\n,,exit,1,,\n,blue,free,2,1,6\n";
    let large = format!("{HEADER}0,alloc,1,9223372036854774784,,4294967294,,,,,\n1,alloc,2,1023,,,,4294967295,,,\n");
    // The last iteration asks for the same things in another order and frees nothing.
    let cut = "tick,event,id,bytes,iteration,module\n0,alloc,1,64,0,a\n1,free,1,,0,a\n2,alloc,2,64,1,a\n3,free,2,,1,a\n\
        4,alloc,3,96,1,b\n5,alloc,4,96,2,b\n6,enter,,,2,\n7,alloc,5,64,2,a\n";
    let mut seeds = vec![zstd(job.as_bytes()), gzip(job.as_bytes()), zstd(b""), gzip(b"tick")];
    let mut broken = zstd::stream::Encoder::new(Vec::new(), 1).expect("memory takes anything");
    broken.write_all(bare.as_bytes()).expect("memory takes anything");
    broken.flush().expect("memory takes anything");
    // A frame without its end.
    seeds.push(broken.get_ref().clone());
    seeds.extend([&job, bare, &large, cut, HEADER, ""].map(|text| text.as_bytes().to_vec()));
    seeds
}
