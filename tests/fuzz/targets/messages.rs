//! Packets of the chunk socket as either side receives them, messages of gRPC, and their conversions.

use std::fmt::Debug;

use prost::Message;
use stitchd::error::ErrorKind;
use stitchd::ids::{ChunkId, DeviceUuid, PlanId};
use stitchd::ladder::{Ladder, Shape};
use stitchd::limits;
use stitchd::units::Bytes;
use stitchd::wire::convert::{self, WantedChunks, WantedPlans};
use stitchd::wire::fd_channel::{ChannelError, FdChannel};
use stitchd::wire::v1::{self, client_frame, daemon_frame};

/// A packet of these bytes, as it is received over a socket.
fn received<M: Message + Default + PartialEq + Debug>(bytes: &[u8]) -> Option<M> {
    let (here, there) = FdChannel::pair().expect("there are descriptors");
    if here.send_bytes(bytes, &[]).is_err() {
        return None;
    }
    match there.receive::<M>() {
        Ok((message, fds)) => {
            assert!(fds.is_empty());
            // One that is written shorter than it came, or as long: what came had room.
            here.send(&message, &[]).expect("what came in a packet fits in one");
            let same = there.receive::<M>().map(|(message, _)| message.encode_to_vec());
            assert!(same == Ok(message.encode_to_vec()) || message.encoded_len() == 0, "{message:?}");
            Some(message)
        }
        Err(ChannelError::Garbage(_)) => None,
        Err(ChannelError::Closed) => {
            assert!(bytes.is_empty());
            None
        }
        Err(ChannelError::TooLong) => {
            assert!(bytes.len() > limits::CHUNK_MESSAGE_LEN_MAX);
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

/// What the daemon makes of a client's packet.
pub(crate) fn client_packet(bytes: &[u8]) {
    let Some(frame) = received::<v1::ClientFrame>(bytes) else { return };
    match frame.what {
        Some(client_frame::What::Acquire(v1::Acquire { want: Some(wanted), .. })) => want(wanted),
        Some(client_frame::What::Release(release)) => {
            if let Ok(ids) = convert::chunk_ids("chunk_ids", &release.chunk_ids) {
                assert!(ids.len() <= limits::RELEASE_CHUNKS_MAX);
            }
        }
        Some(
            client_frame::What::Hello(v1::Hello { ticket, .. }) | client_frame::What::Claim(v1::Claim { ticket, .. }),
        ) => {
            assert_eq!(convert::token("ticket", &ticket).is_ok(), ticket.len() == 16);
        }
        _ => {}
    }
}

fn want(want: v1::Want) {
    let Ok(wanted) = WantedChunks::try_from(want) else { return };
    assert_eq!(WantedChunks::try_from(v1::Want::from(wanted)), Ok(wanted));
    assert!(wanted.len <= limits::ACQUIRE_BYTES_MAX && wanted.wait_ms <= limits::WAIT_MS_MAX);
    let Some(parts) = Ladder::standard().cover(wanted.len, wanted.shape) else { return };
    let covered: Bytes = parts.iter().map(|part| part.bytes().expect("a lease is a size")).sum();
    assert!(covered >= wanted.len && parts.iter().map(|part| part.count).sum::<u64>() <= limits::ACQUIRE_CHUNKS_MAX);
}

/// What a client makes of the daemon's packet.
pub(crate) fn daemon_packet(bytes: &[u8]) {
    let Some(frame) = received::<v1::DaemonFrame>(bytes) else { return };
    match frame.what {
        Some(daemon_frame::What::Batch(batch)) => {
            let Ok(chunks) = convert::chunks("batch.chunks", &batch.chunks) else { return };
            assert_eq!(convert::chunk_infos(&chunks), batch.chunks);
            // Sizes of a full packet can be added.
            let _: Bytes = chunks.iter().map(|(_, len)| *len).sum();
        }
        Some(daemon_frame::What::Refused(refused)) => {
            let _ = ErrorKind::from(refused.kind());
        }
        _ => {}
    }
}

/// Any message of gRPC: the first byte says which.
pub(crate) fn grpc(bytes: &[u8]) {
    let Some((which, bytes)) = bytes.split_first() else { return };
    match which % 10 {
        0 => {
            let Some(open) = decoded::<v1::OpenRequest>(bytes) else { return };
            name(&open.name);
        }
        1 => {
            let Some(reply) = decoded::<v1::OpenReply>(bytes) else { return };
            for device in &reply.devices {
                let _ = convert::size("device.total_bytes", device.total_bytes);
                uuid(&device.uuid);
                name(&device.model);
            }
            let steps: Vec<_> = reply.ladder_bytes.into_iter().map(Bytes::new).collect();
            if let Ok(ladder) = Ladder::new(steps.clone()) {
                assert_eq!(ladder.steps(), steps);
                let _ = ladder.cover(Bytes::new(reply.limit_bytes), Shape::Largest);
            }
        }
        2 => {
            let Some(v1::AcquireRequest { want: Some(wanted), .. }) = decoded(bytes) else { return };
            want(wanted);
        }
        3 => {
            let Some(reply) = decoded::<v1::AcquireReply>(bytes) else { return };
            let _ = convert::chunks("chunks", &reply.chunks);
            let _ = convert::token("ticket", &reply.ticket);
        }
        4 => {
            let Some(release) = decoded::<v1::ReleaseRequest>(bytes) else { return };
            let _ = convert::chunk_ids("chunk_ids", &release.chunk_ids);
        }
        5 => {
            let Some(put) = decoded::<v1::PutPlanRequest>(bytes) else { return };
            name(&put.name);
            let _ = stitchd::plan::format::read(&put.plan);
        }
        6 => {
            let Some(reserve) = decoded::<v1::ReservePlanRequest>(bytes) else { return };
            uuid(&reserve.device_uuid);
        }
        7 => {
            let Some(get) = decoded::<v1::GetPlanRequest>(bytes) else { return };
            get.job.into_iter().for_each(plan_for);
        }
        8 => {
            let Some(list) = decoded::<v1::ListPlansRequest>(bytes) else { return };
            list.job.into_iter().for_each(plan_for);
        }
        _ => {
            decoded::<v1::StatusReply>(bytes);
            decoded::<v1::ListPlansReply>(bytes);
            decoded::<v1::GetPlanReply>(bytes);
            decoded::<v1::Notice>(bytes);
        }
    }
}

fn plan_for(job: v1::PlanFor) {
    let Ok(wanted) = WantedPlans::try_from(job) else { return };
    assert_eq!(v1::PlanFor::from(wanted), job);
    assert!(wanted.rank.is_none_or(|rank| rank < wanted.world_size.unwrap_or(limits::WORLD_SIZE_MAX)));
}

fn decoded<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    let written = message.encode_to_vec();
    let again = M::decode(&written[..]).expect("a message that was written");
    // Maps are written in any order: as long, then, and as many.
    assert_eq!(again.encoded_len(), message.encoded_len());
    Some(message)
}

fn name(text: &str) {
    let Ok(name) = convert::name("name", text) else { return };
    assert!(!name.chars().any(char::is_control) && name.chars().count() == text.chars().count());
}

fn uuid(bytes: &[u8]) {
    let Ok(uuid) = convert::device_uuid("uuid", bytes) else { return };
    assert_eq!(DeviceUuid::parse(&uuid.to_string()), Some(uuid));
}

fn wanted() -> v1::Want {
    WantedChunks {
        device: DeviceUuid(*b"stitchd-host-000"),
        len: Bytes::mib(5),
        shape: Shape::Uniform(Bytes::mib(2)),
        plan: Some(PlanId(7)),
        wait_ms: 100,
        waited_ms: 7,
    }
    .into()
}

pub(crate) fn client_packets() -> Vec<Vec<u8>> {
    let hello = v1::Hello { protocol: 1, ticket: vec![7; 16], patience_ms: 5_000 };
    let claim = v1::Claim { protocol: 1, ticket: vec![9; 16] };
    let largest = v1::Want { shape: Some(v1::want::Shape::Largest(v1::Largest {})), ..wanted() };
    let frames = [
        client_frame::What::Hello(hello),
        client_frame::What::Claim(claim),
        client_frame::What::Acquire(v1::Acquire { request: 3, want: Some(wanted()) }),
        client_frame::What::Acquire(v1::Acquire { request: u64::MAX, want: Some(largest) }),
        client_frame::What::Release(v1::Release { request: 4, chunk_ids: vec![1, 2, u64::MAX] }),
        client_frame::What::Ack(v1::Ack { request: 3 }),
    ];
    let mut seeds: Vec<_> = frames.map(|what| v1::ClientFrame { what: Some(what) }.encode_to_vec()).into();
    seeds.extend([Vec::new(), vec![0; limits::CHUNK_MESSAGE_LEN_MAX + 1]]);
    seeds
}

pub(crate) fn daemon_packets() -> Vec<Vec<u8>> {
    let chunks = convert::chunk_infos(&[(ChunkId(1), Bytes::mib(2)), (ChunkId(u64::MAX), Bytes::gib(4))]);
    let many = convert::chunk_infos(&vec![(ChunkId(u64::MAX), Bytes::gib(4)); 3_000]);
    let frames = [
        daemon_frame::What::Welcome(v1::Welcome { session_id: 1, stats_page_version: 1, says_working: true }),
        daemon_frame::What::Working(v1::Working { request: 3, ready: 2, wanted: u64::MAX }),
        daemon_frame::What::Batch(v1::Batch { request: 3, chunks, is_last: true }),
        daemon_frame::What::Batch(v1::Batch { request: 3, chunks: many, is_last: false }),
        daemon_frame::What::Refused(v1::Refused { request: 3, kind: 1, message: "none left".into() }),
        daemon_frame::What::Refused(v1::Refused { request: 0, kind: -1, message: String::new() }),
    ];
    let mut seeds: Vec<_> = frames.map(|what| v1::DaemonFrame { what: Some(what) }.encode_to_vec()).into();
    seeds.push(Vec::new());
    seeds
}

pub(crate) fn grpc_seeds() -> Vec<Vec<u8>> {
    let open = v1::OpenRequest { protocol: 1, name: "a\nb".into(), limit_bytes: 5, ..v1::OpenRequest::default() };
    let device = v1::Device { uuid: vec![5; 16], model: "host".into(), total_bytes: 1 << 34, ordinal: 0 };
    let reply = v1::OpenReply {
        protocol: 1,
        secret: vec![1; 16],
        ticket: vec![2; 16],
        devices: vec![device.clone()],
        driver: "host".into(),
        ladder_bytes: vec![2 << 20, 32 << 20],
        limit_bytes: 1 << 30,
        chunk_socket: "chunks.sock".into(),
        ..v1::OpenReply::default()
    };
    let acquire = v1::AcquireRequest { session_id: 1, secret: vec![1; 16], want: Some(wanted()) };
    let chunks = convert::chunk_infos(&[(ChunkId(1), Bytes::mib(2))]);
    let acquired = v1::AcquireReply { ticket: vec![3; 16], chunks };
    let release = v1::ReleaseRequest { session_id: 1, secret: vec![1; 16], chunk_ids: vec![1, 2] };
    let put = v1::PutPlanRequest { plan: super::plan::seeds().remove(0), name: "job".into() };
    let reserve = v1::ReservePlanRequest { plan_id: 1, device_uuid: vec![5; 16], wait_ms: 0 };
    let job = Some(v1::PlanFor { fingerprint: Some(0x1234), rank: Some(3), world_size: Some(8) });
    let get = v1::GetPlanRequest { plan_id: 0, job };
    let list = v1::ListPlansRequest { job: Some(v1::PlanFor { world_size: Some(8), ..v1::PlanFor::default() }) };
    let session = v1::SessionStatus { counters: [("live_bytes".to_owned(), 7)].into(), ..v1::SessionStatus::default() };
    let status = v1::StatusReply {
        devices: vec![v1::DeviceStatus { device: Some(device), ..v1::DeviceStatus::default() }],
        sessions: vec![session],
        ..v1::StatusReply::default()
    };
    let bodies = [
        open.encode_to_vec(),
        reply.encode_to_vec(),
        acquire.encode_to_vec(),
        acquired.encode_to_vec(),
        release.encode_to_vec(),
        put.encode_to_vec(),
        reserve.encode_to_vec(),
        get.encode_to_vec(),
        list.encode_to_vec(),
        status.encode_to_vec(),
    ];
    (0..).zip(bodies).map(|(which, body)| [vec![which], body].concat()).collect()
}
