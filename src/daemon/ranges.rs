//! Shared ranges by name: who may publish, find, attach and withdraw one.
//!
//! A name is its tenant's: two tenants may use the same, and neither learns of the other's. A range that was published with a key is for whoever shows the key, of whatever tenant, and for nobody else. That there is no such
//! name, and that the key is wrong, are one answer.
//!
//! What goes from one tenant to another is in the log (target `audit`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::{Request, Response, Status};

use super::refusals::Refused;
use super::registry::{Entry, Good};
use super::service::{Service, from_ledger, refused};
use super::tenants::Wish;
use super::{Daemon, NodeDevice};
use crate::error::{ErrorKind, chain};
use crate::ids::{RangeId, SessionId};
use crate::journal::{self, PublishedRange};
use crate::ledger::{LedgerError, RangeView};
use crate::limits;
use crate::mortal::moment;
use crate::store::StoreError;
use crate::units::Bytes;
use crate::wire::convert;
use crate::wire::status::status;
use crate::wire::v1;
use crate::wire::v1::ranges_server::Ranges;

/// A range under its name.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Named {
    range: RangeId,
    tenant: String,
    name: String,
    version: u64,
    /// Who has it may attach; where there is none the tenant may.
    key: Option<Vec<u8>>,
    content: Bytes,
    bytes: Bytes,
    is_writable: bool,
    is_sealed: bool,
    publisher: SessionId,
}

/// All names.
#[derive(Debug, Default)]
pub(super) struct Names {
    book: Mutex<Book>,
    /// Held while somebody publishes: what a tenant may have is looked at and used up in one.
    publishing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Book {
    by_range: BTreeMap<RangeId, Arc<Named>>,
    /// The newest range of each name.
    newest: BTreeMap<(String, String), RangeId>,
    versions: u64,
}

impl Book {
    /// The name is nobody's, unless another range has it by now.
    fn free_name(&mut self, of: &Named) {
        let name = (of.tenant.clone(), of.name.clone());
        if self.newest.get(&name) == Some(&of.range) {
            self.newest.remove(&name);
        }
    }
}

/// Whether two keys are the same, in a time that does not tell where they differ.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The range is no more.
    pub(super) fn forget(&self, range: RangeId) {
        let mut book = self.lock();
        let Some(gone) = book.by_range.remove(&range) else { return };
        book.free_name(&gone);
        tracing::info!(%range, name = gone.name, version = gone.version, tenant = gone.tenant, "shared range gone");
    }

    fn get(&self, range: RangeId) -> Option<Arc<Named>> {
        self.lock().by_range.get(&range).map(Arc::clone)
    }

    fn all(&self) -> Vec<Arc<Named>> {
        self.lock().by_range.values().map(Arc::clone).collect()
    }

    /// Bytes of a tenant's ranges.
    fn bytes_of(&self, tenant: &str) -> Bytes {
        self.lock().by_range.values().filter(|named| named.tenant == tenant).map(|named| named.bytes).sum()
    }

    fn count_of(&self, tenant: &str) -> usize {
        self.lock().by_range.values().filter(|named| named.tenant == tenant).count()
    }

    /// Whether a range of this tenant and name may make way for one with this key: what has a key only for the same.
    fn may_replace(&self, tenant: &str, name: &str, key: Option<&[u8]>) -> bool {
        let book = self.lock();
        let former = book.newest.get(&(tenant.to_owned(), name.to_owned())).and_then(|range| book.by_range.get(range));
        former.is_none_or(|former| match (&former.key, key) {
            (None, _) => true,
            (Some(theirs), Some(ours)) => is_same(theirs, ours),
            (Some(_), None) => false,
        })
    }

    /// A version that no range has had.
    fn next_version(&self) -> u64 {
        let mut book = self.lock();
        book.versions += 1;
        book.versions
    }

    /// Begins with the names that the daemon before has left, and goes on from its versions.
    pub(super) fn resume(&self, left: &journal::Book) {
        let (.., versions) = left.last_numbers();
        self.lock().versions = versions;
        for (range, known) in left.ranges() {
            let of = &known.of;
            let bytes = of.chunks.iter().filter_map(|chunk| left.chunks().get(chunk)).map(|known| known.len).sum();
            // In the order of their numbers: the last one of a name has it.
            self.add(Named {
                range: *range,
                tenant: of.tenant.clone(),
                name: of.name.clone(),
                version: of.version,
                key: Some(of.key.clone()).filter(|key| !key.is_empty()),
                content: of.content,
                bytes,
                is_writable: of.is_writable,
                is_sealed: of.is_sealed,
                publisher: of.publisher,
            });
        }
        left.ranges().iter().filter(|(_, known)| known.is_withdrawn).for_each(|(range, _)| self.withdraw(*range));
    }

    /// Gives a range its name, and a version where it has none. The range that had the name before, if there is one, is for nobody new.
    fn add(&self, named: Named) -> (Arc<Named>, Option<RangeId>) {
        let mut book = self.lock();
        if named.version == 0 {
            book.versions += 1;
        }
        let version = if named.version == 0 { book.versions } else { named.version };
        let named = Arc::new(Named { version, ..named });
        book.by_range.insert(named.range, Arc::clone(&named));
        let former = book.newest.insert((named.tenant.clone(), named.name.clone()), named.range);
        (named, former)
    }

    /// The name is free again.
    fn withdraw(&self, range: RangeId) {
        let mut book = self.lock();
        if let Some(known) = book.by_range.get(&range).map(Arc::clone) {
            book.free_name(&known);
        }
    }

    /// The newest range of this name that a session of `tenant` may attach: with a key, whoever's has it; without, the tenant's own.
    fn find(&self, tenant: &str, name: &str, version: u64, key: Option<&[u8]>) -> Option<Arc<Named>> {
        let book = self.lock();
        let may = |named: &Named| match (&named.key, key) {
            (None, None) => named.tenant == tenant,
            (Some(theirs), Some(ours)) => is_same(theirs, ours),
            _ => false,
        };
        let of_name = book.newest.values().filter_map(|range| book.by_range.get(range));
        let wanted = of_name.filter(|named| named.name == name && may(named));
        let wanted = wanted.filter(|named| version == 0 || named.version == version);
        // Whoever was given a key could publish with it, too: a tenant's own come first.
        wanted.max_by_key(|named| (named.tenant == tenant, named.version)).map(Arc::clone)
    }
}

/// Reads a range's name: unlike a session's it is there.
fn range_name(name: &str) -> Result<String, Status> {
    if name.is_empty() {
        return Err(refused(&convert::malformed("name", "empty")));
    }
    convert::name("name", name).map_err(|error| refused(&error))
}

/// Reads a key: none where it is empty.
fn key(bytes: Vec<u8>) -> Result<Option<Vec<u8>>, Status> {
    match bytes.len() {
        0 => Ok(None),
        limits::KEY_LEN_MIN..=limits::KEY_LEN_MAX => Ok(Some(bytes)),
        len => {
            let text = format!("{len} bytes, and it should have {} to {}", limits::KEY_LEN_MIN, limits::KEY_LEN_MAX);
            Err(refused(&convert::malformed("key", text)))
        }
    }
}

impl Daemon {
    fn message_of(&self, named: &Named, view: &RangeView) -> v1::SharedRange {
        let uuid = |device: &NodeDevice| device.uuid.0.to_vec();
        let device = self.devices.iter().find(|device| device.id == view.device);
        v1::SharedRange {
            range_id: named.range.0,
            name: named.name.clone(),
            version: named.version,
            tenant: named.tenant.clone(),
            device_uuid: device.map_or_else(Vec::new, uuid),
            len_bytes: view.bytes().get(),
            content_bytes: named.content.get(),
            chunks: view.chunks.len() as u64,
            holder_session_ids: view.holders.iter().map(|session| session.0).collect(),
            linger_ms: view.linger_ms,
            left_ms: view.left_ms,
            is_writable: named.is_writable,
            is_sealed: named.is_sealed,
            has_key: named.key.is_some(),
            is_withdrawn: view.is_withdrawn,
            publisher_session_id: named.publisher.0,
        }
    }
}

impl Service {
    /// A ticket for the descriptors of a range that the session holds. Without one it holds it no more.
    fn hand_out<T>(
        &self,
        request: &Request<T>,
        entry: &Entry,
        view: &RangeView,
    ) -> Result<(Vec<u8>, Vec<v1::ChunkInfo>), Status> {
        let claim = entry.claims.of_hold(entry, view.range);
        let peer = Self::peer(request)?;
        let ticket = self.0.registry.issue(Good::Claim(claim), peer.identity, self.0.clock.now());
        let ticket = ticket.map_err(|error| {
            let _ = self.0.detach(entry, view.range);
            status(ErrorKind::Broken, chain(&error))
        })?;
        Ok((ticket.to_vec(), convert::chunk_infos(&view.chunks)))
    }

    fn no_such_range(name: &str, version: u64) -> Status {
        let version = if version == 0 { String::new() } else { format!(", version {version}") };
        let text = format!(
            "there is no shared range '{name}'{version} for this session: it was never published, is gone or withdrawn, is another tenant's, or its key is another (`stitchd shared` shows those of your tenant)"
        );
        status(ErrorKind::NotFound, text)
    }
}

#[tonic::async_trait]
impl Ranges for Service {
    async fn publish(&self, request: Request<v1::PublishRequest>) -> Result<Response<v1::PublishReply>, Status> {
        self.check_draining()?;
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let (daemon, wanted) = (&self.0, request.get_ref());
        let name = range_name(&wanted.name)?;
        let key = key(wanted.key.clone())?;
        let chunks = convert::chunk_ids("chunk_ids", &wanted.chunk_ids).map_err(|error| refused(&error))?;
        let store = daemon.steward.store();
        let bytes: Bytes = chunks.iter().filter_map(|chunk| store.len_of(*chunk).ok()).sum();
        if let Some(lost) = chunks.iter().find(|chunk| store.len_of(**chunk).is_ok() && !store.can_hand_on(**chunk)) {
            return Err(status(ErrorKind::Conflict, StoreError::NoDescriptor(*lost).to_string()));
        }
        let content = Bytes::new(wanted.content_bytes);
        if content > bytes {
            return Err(refused(&convert::malformed("content_bytes", format!("{content}, of a range of {bytes}"))));
        }
        let linger_ms = u64::try_from(daemon.config.linger_max.as_millis()).unwrap_or(u64::MAX).min(wanted.linger_ms);
        let _publishing = daemon.names.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        // What a tenant leaves behind is nobody's session's: it has a bound of its own.
        let limit = daemon.steward.session(entry.id).map_or(Bytes::ZERO, |view| view.terms.limit);
        let shared = daemon.names.bytes_of(&entry.tenant);
        if shared.checked_add(bytes).is_none_or(|sum| sum > limit) {
            let text = format!(
                "{bytes} to publish, and the tenant '{}' has {shared} in shared ranges: together more than this session's limit of {limit}",
                entry.tenant
            );
            return Err(status(ErrorKind::OverLimit, text));
        }
        if daemon.names.count_of(&entry.tenant) >= limits::TENANT_RANGES_MAX {
            let text = format!(
                "the tenant '{}' has {} shared ranges, as many as one may have",
                entry.tenant,
                limits::TENANT_RANGES_MAX
            );
            return Err(status(ErrorKind::Exhausted, text));
        }
        if !daemon.names.may_replace(&entry.tenant, &name, key.as_deref()) {
            let text = format!(
                "a shared range '{name}' was published with another key: it makes way only for one with the same"
            );
            return Err(status(ErrorKind::Conflict, text));
        }
        let version = daemon.names.next_version();
        let record = |range, chunks| {
            Some(PublishedRange {
                range,
                name: name.clone(),
                tenant: entry.tenant.clone(),
                version,
                key: key.clone().unwrap_or_default(),
                content,
                is_writable: wanted.is_writable,
                is_sealed: false,
                publisher: entry.id,
                linger_ms,
                chunks,
            })
        };
        let publish = || daemon.steward.publish_as(entry.id, chunks.clone(), linger_ms, record);
        let published = daemon.publish_chunks(&entry, &chunks, publish);
        let range = published.map_err(|error| from_ledger(&error))?;
        moment();
        // Nobody finds it before it has a name: until then it is not attached.
        let is_sealed = !wanted.is_writable
            && daemon.steward.store().seal(&chunks).unwrap_or_else(|error| {
                tracing::warn!(%range, name, session = %entry.id, error = %chain(&error), "a shared range can be written: somebody maps it for that");
                false
            });
        if is_sealed {
            daemon.steward.note_sealed(range);
        }
        let (is_writable, publisher) = (wanted.is_writable, entry.id);
        let named = Named {
            range,
            tenant: entry.tenant.clone(),
            name,
            version,
            key,
            content,
            bytes,
            is_writable,
            is_sealed,
            publisher,
        };
        moment();
        let (named, former) = daemon.names.add(named);
        if let Some(former) = former {
            // It may have gone by itself in this moment.
            let _ = daemon.steward.withdraw(former);
        }
        let view = daemon.steward.range(range).ok_or_else(|| from_ledger(&LedgerError::NoRange(range)));
        let view = view.inspect_err(|_| daemon.names.forget(range))?;
        tracing::info!(target: "audit", %range, name = named.name, version = named.version, tenant = named.tenant, session = %entry.id, bytes = bytes.get(), is_sealed, has_key = named.key.is_some(), "published");
        moment();
        let handed_out = self.hand_out(&request, &entry, &view);
        // Whoever hears of a failure believes that nothing was published.
        let (ticket, infos) = handed_out.inspect_err(|_| {
            daemon.names.withdraw(range);
            let _ = daemon.steward.withdraw(range);
        })?;
        let range = Some(daemon.message_of(&named, &view));
        Ok(Response::new(v1::PublishReply { range, ticket, chunks: infos }))
    }

    async fn attach(&self, request: Request<v1::AttachRequest>) -> Result<Response<v1::AttachReply>, Status> {
        self.check_draining()?;
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let (daemon, wanted) = (&self.0, request.get_ref());
        let name = range_name(&wanted.name)?;
        let key = key(wanted.key.clone())?;
        let peer = Self::peer(&request)?;
        let none = || {
            daemon.refusals.note(Refused::Range, &peer, &name);
            Service::no_such_range(&name, wanted.version)
        };
        let named = daemon.names.find(&entry.tenant, &name, wanted.version, key.as_deref()).ok_or_else(none)?;
        let attached = daemon.steward.attach(entry.id, named.range);
        let view = attached.map_err(|error| match error {
            // It went in this moment.
            LedgerError::NoRange(_) => Service::no_such_range(&name, wanted.version),
            LedgerError::Refused(refusal) => status(refusal.kind(), daemon.explain(&refusal)),
            other => from_ledger(&other),
        })?;
        moment();
        let is_across = named.tenant != entry.tenant;
        tracing::info!(target: "audit", range = %named.range, name, version = named.version, tenant = entry.tenant, of_tenant = named.tenant, is_across, session = %entry.id, "attached");
        let (ticket, infos) = self.hand_out(&request, &entry, &view)?;
        let range = Some(daemon.message_of(&named, &view));
        Ok(Response::new(v1::AttachReply { range, ticket, chunks: infos }))
    }

    async fn detach(&self, request: Request<v1::DetachRequest>) -> Result<Response<v1::DetachReply>, Status> {
        let entry = self.authorise(&request, request.get_ref().session_id, &request.get_ref().secret)?;
        let range = RangeId(request.get_ref().range_id);
        self.0.detach(&entry, range).map_err(|error| from_ledger(&error))?;
        Ok(Response::new(v1::DetachReply {}))
    }

    async fn withdraw(&self, request: Request<v1::WithdrawRequest>) -> Result<Response<v1::WithdrawReply>, Status> {
        let peer = Self::peer(&request)?;
        let range = RangeId(request.get_ref().range_id);
        let named = self.0.names.get(range).filter(|named| {
            self.0.config.is_admin(&peer) || self.tenant_of(&peer).is_some_and(|tenant| tenant == named.tenant)
        });
        let named = named.ok_or_else(|| from_ledger(&LedgerError::NoRange(range)))?;
        self.0.names.withdraw(range);
        let holders = self.0.steward.range(range).map_or(0, |view| view.holders.len());
        self.0.steward.withdraw(range).map_err(|error| from_ledger(&error))?;
        tracing::info!(target: "audit", %range, name = named.name, version = named.version, tenant = named.tenant, uid = peer.uid, pid = peer.pid, "withdrawn");
        Ok(Response::new(v1::WithdrawReply { holders: u32::try_from(holders).unwrap_or(u32::MAX) }))
    }

    async fn list(&self, request: Request<v1::ListRangesRequest>) -> Result<Response<v1::ListRangesReply>, Status> {
        let peer = Self::peer(&request)?;
        let is_admin = self.0.config.is_admin(&peer);
        let tenant = self.tenant_of(&peer);
        let mut ranges = Vec::new();
        for named in self.0.names.all() {
            let may_see = is_admin || tenant.as_ref() == Some(&named.tenant);
            if let (true, Some(view)) = (may_see, self.0.steward.range(named.range)) {
                ranges.push(self.0.message_of(&named, &view));
            }
        }
        Ok(Response::new(v1::ListRangesReply { ranges }))
    }
}

impl Service {
    /// The tenant of a process that has no session.
    fn tenant_of(&self, peer: &crate::wire::peer::Peer) -> Option<String> {
        let wish = Wish { tenant: "", limit: Bytes::ZERO, priority: 0, guarantee: None, answers: false };
        self.0.config.seat(peer, &wish, Bytes::ZERO).ok().map(|seated| seated.tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(range: u64, tenant: &str, name: &str, key: Option<&[u8]>) -> Named {
        Named {
            range: RangeId(range),
            tenant: tenant.into(),
            name: name.into(),
            version: 0,
            key: key.map(<[u8]>::to_vec),
            content: Bytes::new(1),
            bytes: Bytes::mib(2),
            is_writable: false,
            is_sealed: true,
            publisher: SessionId(1),
        }
    }

    #[test]
    fn a_name_is_its_tenants_and_a_key_is_for_whoever_has_it() {
        let names = Names::default();
        names.add(named(1, "a", "weights", None));
        names.add(named(2, "b", "weights", None));
        names.add(named(3, "b", "secret", Some(&[7; 16])));
        let found = |tenant, name, key: Option<&[u8]>| names.find(tenant, name, 0, key).map(|named| named.range.0);
        assert_eq!((found("a", "weights", None), found("b", "weights", None)), (Some(1), Some(2)));
        assert_eq!(found("c", "weights", None), None);
        assert_eq!(found("a", "weights", Some(&[7; 16])), None, "a key opens what has one");
        assert_eq!((found("b", "secret", None), found("a", "secret", Some(&[7; 16]))), (None, Some(3)));
        for wrong in [&[8; 16][..], &[7; 15], &[7; 17], &[]] {
            assert_eq!(found("b", "secret", Some(wrong)), None);
        }
        assert_eq!((names.bytes_of("b"), names.count_of("b")), (Bytes::mib(4), 2));
    }

    #[test]
    fn who_was_given_a_key_publishes_nothing_in_the_place_of_who_gave_it() {
        let names = Names::default();
        let key = Some(&[7; 16][..]);
        let (first, _) = names.add(named(1, "a", "weights", key));
        let (second, _) = names.add(named(2, "b", "weights", key));
        let found = |tenant, version| names.find(tenant, "weights", version, key).map(|named| named.range.0);
        assert_eq!((found("a", 0), found("b", 0)), (Some(1), Some(2)), "a tenant's own come first");
        assert_eq!((found("c", first.version), found("c", second.version)), (Some(1), Some(2)));
    }

    #[test]
    fn a_later_range_of_a_name_takes_its_place_and_what_has_a_key_only_with_it() {
        let names = Names::default();
        let (first, former) = names.add(named(1, "a", "weights", None));
        assert_eq!((first.version, former), (1, None));
        assert!(names.may_replace("a", "weights", Some(&[7; 16])));
        let (second, former) = names.add(named(2, "a", "weights", Some(&[7; 16])));
        assert_eq!((second.version, former), (2, Some(RangeId(1))));
        assert!(names.may_replace("a", "weights", Some(&[7; 16])) && names.may_replace("b", "weights", None));
        assert!(!names.may_replace("a", "weights", None) && !names.may_replace("a", "weights", Some(&[8; 16])));
        // Whoever wants the first, wants what is for nobody new.
        assert_eq!(names.find("a", "weights", 1, None), None);
        assert_eq!(names.find("a", "weights", 2, Some(&[7; 16])), Some(second));
        names.forget(RangeId(1));
        assert!(names.find("a", "weights", 0, Some(&[7; 16])).is_some());
        names.withdraw(RangeId(2));
        assert_eq!((names.find("a", "weights", 0, Some(&[7; 16])), names.all().len()), (None, 1));
        names.forget(RangeId(2));
        assert!(names.all().is_empty() && names.lock().newest.is_empty());
    }
}
