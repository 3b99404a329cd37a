//! No byte of one session ever reaches another, and no chunk has two holders, whatever the first one keeps.

use stitchd::driver::Driver;
use stitchd::ids::DeviceId;
use stitchd::pool::Request;
use stitchd::runtime::RuntimeConfig;
use stitchd::units::{Bytes, Place as _};
use stitchd::wire::v1;
use stitchd::wire::v1::client_frame;

use crate::raw::{self, Grpc};
use crate::support::TestDaemon;

const MIB: u64 = 1 << 20;

#[test]
fn a_mapping_that_is_kept_after_release_shows_nothing_and_disturbs_nobody() {
    let daemon = TestDaemon::start(64);
    let grpc = Grpc::connect(&daemon);
    let (first, channel) = raw::link(&daemon, &grpc, "keeper");
    let leased = raw::acquire(&channel, 1, raw::want(&first, 64)).unwrap();
    // A client that cheats: it says that it gives everything back, and keeps a descriptor.
    let spy = daemon.driver();
    let handle = spy.import(DeviceId(0), leased[0].1.try_clone().unwrap(), Bytes::mib(2)).unwrap();
    let window = spy.reserve(DeviceId(0), Bytes::mib(2), Bytes::mib(2)).unwrap();
    spy.map(window, handle).unwrap();
    let span = stitchd::units::Span::new(window, Bytes::mib(2)).unwrap();
    spy.set_access(span, DeviceId(0), stitchd::driver::Access::ReadWrite).unwrap();
    spy.write(window, &[0x66; 4096]).unwrap();
    let chunk_ids: Vec<_> = leased.iter().map(|(id, _)| *id).collect();
    drop(leased);
    raw::send(&channel, client_frame::What::Release(v1::Release { request: 2, chunk_ids }));
    daemon.wait_for_device("leased_bytes", 0);

    // Another session gets all that is really free: the device without what the cheat keeps.
    // In small chunks: a create that is refused takes its bytes off the budget.
    let second = daemon.session("second").runtime(0, RuntimeConfig::default().with_uniform_chunks()).unwrap();
    let error = second.alloc(&Request::of(Bytes::mib(64))).unwrap_err();
    assert!(stitchd::error::chain(&error).contains("62.0 MiB"), "{}", stitchd::error::chain(&error));
    let address = second.alloc(&Request::of(Bytes::mib(62))).unwrap();
    let driver = daemon_driver(&second);
    let mut bytes = vec![1; 62 << 20];
    driver.read(address, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "another session's bytes were handed on");
    bytes.fill(0x77);
    driver.write(address, &bytes).unwrap();
    spy.write(window, &[0x66; 4096]).unwrap();
    driver.read(address, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0x77), "a mapping that was kept after release reaches another's bytes");
    // When the cheat lets go, its bytes are everybody's again.
    spy.unmap(span).unwrap();
    spy.release(handle).unwrap();
    drop(second);
    daemon.wait_for_device("available_bytes", 64 * MIB);
}

fn daemon_driver(runtime: &stitchd::runtime::Runtime) -> &dyn Driver {
    runtime.device().driver()
}

#[test]
fn two_sessions_at_once_see_only_their_own_patterns() {
    let daemon = TestDaemon::start(256);
    std::thread::scope(|scope| {
        for number in 1..=4_u8 {
            let daemon = &daemon;
            scope.spawn(move || {
                let runtime = daemon.runtime(&format!("trainer-{number}"));
                let mut rng = stitchd::rng::Rng::new(u64::from(number));
                let mut live = Vec::new();
                for _ in 0..400 {
                    if rng.chance(550) && live.len() < 6 {
                        let bytes = Bytes::new(1 + rng.below(8 << 20));
                        let Ok(address) = runtime.alloc(&Request::of(bytes)) else { continue };
                        let ends = [address, address.checked_add(bytes - Bytes::new(1)).unwrap()];
                        for at in ends {
                            let mut byte = [0];
                            daemon_driver(&runtime).read(at, &mut byte).unwrap();
                            assert!(byte[0] == 0 || byte[0] == number, "session {number} sees {}", byte[0]);
                            daemon_driver(&runtime).write(at, &[number]).unwrap();
                        }
                        live.push((address, ends));
                    } else if !live.is_empty() {
                        let (address, ends) = live.swap_remove(rng.index(live.len()));
                        for at in ends {
                            let mut byte = [0];
                            daemon_driver(&runtime).read(at, &mut byte).unwrap();
                            assert_eq!(byte[0], number);
                        }
                        runtime.free(address, stitchd::ids::StreamId::DEFAULT).unwrap();
                        if rng.chance(200) {
                            runtime.trim(Bytes::mib(4));
                        }
                    }
                }
            });
        }
    });
    daemon.wait_for_device("available_bytes", 256 * MIB);
}
