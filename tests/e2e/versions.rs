//! Peers of different versions: what an older one says a newer one understands, and the other way round.
//!
//! `tests/data/protocol` has the protocol of earlier builds, as it was. Protobuf leaves out what one does not know; what must not happen is that a number means something else.

use std::collections::BTreeMap;
use std::path::Path;

use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto};

use crate::raw::{self, Grpc};
use crate::support::TestDaemon;

const MIB: u64 = 1 << 20;
const DEVICE: &str = "--device=0=64MiB";

/// What a message or a service says, by name: each field with its number and type.
type Said = BTreeMap<String, String>;

fn note_message(said: &mut Said, within: &str, message: &DescriptorProto) {
    let name = format!("{within}.{}", message.name());
    for field in &message.field {
        let what = format!("{:?} {:?} {}", field.label(), field.r#type(), field.type_name());
        said.insert(format!("{name} {}", field.number()), format!("{} {what}", field.name()));
    }
    message.nested_type.iter().for_each(|nested| note_message(said, &name, nested));
    message.enum_type.iter().for_each(|nested| note_enum(said, &name, nested));
}

fn note_enum(said: &mut Said, within: &str, of: &EnumDescriptorProto) {
    for value in &of.value {
        said.insert(format!("{within}.{} {}", of.name(), value.number()), value.name().to_owned());
    }
}

fn said_in(directory: &Path, file: &str) -> Said {
    let compiled = protox::compile([file], [directory]).unwrap();
    let mut said = Said::new();
    for file in &compiled.file {
        let FileDescriptorProto { message_type, enum_type, service, .. } = file;
        message_type.iter().for_each(|message| note_message(&mut said, file.package(), message));
        enum_type.iter().for_each(|of| note_enum(&mut said, file.package(), of));
        for service in service {
            for method in &service.method {
                let name = format!("{}.{}.{}", file.package(), service.name(), method.name());
                let what = format!("{} -> {}", method.input_type(), method.output_type());
                said.insert(name, format!("{what} {} {}", method.client_streaming(), method.server_streaming()));
            }
        }
    }
    said
}

#[test]
fn what_an_earlier_build_could_say_means_the_same_today() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let today = said_in(&root.join("proto"), "stitchd/v1/stitchd.proto");
    let earlier = root.join("tests/data/protocol");
    let mut compared = 0;
    for file in std::fs::read_dir(&earlier).unwrap() {
        let file = file.unwrap().file_name().into_string().unwrap();
        let before = said_in(&earlier, &file);
        assert!(before.len() > 300, "{file} says {}", before.len());
        for (name, meaning) in &before {
            assert_eq!(today.get(name), Some(meaning), "{name}, as {file} has it");
        }
        compared += 1;
    }
    assert!(compared > 0 && today.len() > 300);
}

#[test]
fn a_client_that_does_not_come_back_keeps_what_it_has_and_can_still_say_goodbye() {
    // As clients were before there was `Reattach`.
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let (session, channel) = raw::link(&daemon, &grpc, "of before");
    let leased = raw::acquire(&channel, 1, raw::want(&session, 16)).unwrap();
    let daemon = daemon.follow(&[DEVICE]);
    assert_eq!(daemon.device("leased_bytes"), 16 * MIB, "nobody else gets it");
    daemon.runtime("other").alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(50))).unwrap_err();
    drop(leased);
    // The connection for gRPC is made again by itself.
    let closed = crate::support::eventually_or_says("that it is closed", || grpc.close(&session));
    assert_eq!(closed.returned_bytes, 16 * MIB);
    daemon.wait_for_device("available_bytes", 64 * MIB);
}
