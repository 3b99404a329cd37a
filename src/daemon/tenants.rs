//! Whose a session is, and what it may have.
//!
//! A tenant is named in the configuration, with the users and pods that are it. Whoever is nobody's there is a tenant of his own: his pod, or else his user. A process may say which of
//! the configured tenants it is that it may be; it cannot say that it is somebody else.

use super::config::{Config, TenantConfig};
use crate::ledger::{Overstay, Terms};
use crate::units::Bytes;
use crate::wire::peer::{Peer, UID_OVERFLOW, is_beside_us, pod_of};

/// What a session is opened with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Seated {
    pub(super) tenant: String,
    pub(super) terms: Terms,
    /// What it is to be guaranteed of each device that it uses.
    pub(super) guarantee: Bytes,
    /// The most that it can be.
    pub(super) guarantee_max: Bytes,
}

/// What a session asks for.
#[derive(Clone, Debug)]
pub(super) struct Wish<'a> {
    /// A tenant's name, or nothing.
    pub(super) tenant: &'a str,
    pub(super) limit: Bytes,
    pub(super) priority: u32,
    /// Of each device that it uses; nothing for what its tenant has.
    pub(super) guarantee: Option<Bytes>,
    pub(super) answers: bool,
}

impl TenantConfig {
    fn has(&self, uid: u32, pod: Option<&str>) -> bool {
        self.uids.contains(&uid) || pod.is_some_and(|pod| self.pods.iter().any(|of| of == pod))
    }

    /// Nobody in particular is it: whoever says so is.
    fn is_open(&self) -> bool {
        self.uids.is_empty() && self.pods.is_empty()
    }
}

impl Config {
    /// The terms of a session of this process; `all` is what the devices have together.
    pub(super) fn seat(&self, peer: &Peer, wish: &Wish<'_>, all: Bytes) -> Result<Seated, String> {
        self.seat_of(peer.uid, pod_of(peer.pid).as_deref(), wish, all)
    }

    fn seat_of(&self, uid: u32, pod: Option<&str>, wish: &Wish<'_>, all: Bytes) -> Result<Seated, String> {
        let own = pod.map_or_else(|| format!("uid:{uid}"), |pod| format!("pod:{pod}"));
        let first = self.tenants.iter().find(|tenant| tenant.has(uid, pod));
        let known = if wish.tenant.is_empty() || wish.tenant == own {
            // Whose terms somebody has is not for himself to leave.
            first
        } else {
            let named = self.tenants.iter().find(|tenant| tenant.name == wish.tenant);
            let named =
                named.ok_or_else(|| format!("there is no tenant '{}' in the daemon's configuration", wish.tenant))?;
            let may = if named.is_open() { first.is_none() } else { named.has(uid, pod) };
            if !may {
                let whose = first.map_or_else(String::new, |first| format!(", which is the tenant '{}',", first.name));
                return Err(format!(
                    "this process ({own}){whose} is none of the users and pods that are the tenant '{}'",
                    wish.tenant
                ));
            }
            Some(named)
        };
        let configured = known.and_then(|tenant| tenant.limit).or(self.session_limit);
        let limit = match (wish.limit, configured) {
            (Bytes::ZERO, configured) => configured.unwrap_or(all),
            // One that nobody was given by name may say more: it is what a session has that says nothing.
            (wanted, Some(most)) if known.is_some_and(|tenant| tenant.limit.is_some()) => wanted.min(most),
            (wanted, _) => wanted,
        };
        let priority = match known {
            // It may be more modest than it has to be, by saying so.
            Some(tenant) if wish.priority == 0 => tenant.priority,
            Some(tenant) => wish.priority.min(tenant.priority.max(self.priority_max)),
            None => wish.priority.min(self.priority_max),
        };
        let terms = Terms {
            limit: limit.min(all),
            priority,
            lends: known.is_none_or(|tenant| tenant.lends),
            answers: wish.answers,
        };
        // No more than it may hold: a guarantee that cannot be made would keep it from starting.
        let usual = known.map_or(Bytes::ZERO, |tenant| tenant.guarantee.min(terms.limit));
        let most = known.map_or_else(|| self.guarantee_max_of_others(all), |tenant| tenant.guarantee_max);
        let guarantee_max = most.min(terms.limit);
        let tenant = known.map_or(own, |tenant| tenant.name.clone());
        if let Some(wanted) = wish.guarantee.filter(|wanted| *wanted > guarantee_max) {
            return Err(over_guarantee(wanted, &tenant, guarantee_max));
        }
        let guarantee = wish.guarantee.unwrap_or(usual);
        Ok(Seated { tenant, terms, guarantee, guarantee_max })
    }

    /// Of sessions of no tenant: where there are none nobody else's guarantee is in the way. Not where borrowers' processes are ended for it.
    fn guarantee_max_of_others(&self, all: Bytes) -> Bytes {
        let is_free = self.tenants.is_empty() && self.borrowed != Overstay::End;
        self.guarantee_max.unwrap_or(if is_free { all } else { Bytes::ZERO })
    }

    /// A process may act on the daemon and on all sessions. Root in a container is not root of the node, and what a user namespace shows as somebody may be nobody.
    pub(super) fn is_admin(&self, peer: &Peer) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let is_trusted = peer.uid == 0 || peer.uid == own && own != UID_OVERFLOW;
        self.admins.contains(&peer.uid) || is_trusted && is_beside_us(peer.pid)
    }
}

/// Why a session is not guaranteed so much.
pub(super) fn over_guarantee(wanted: Bytes, tenant: &str, most: Bytes) -> String {
    format!(
        "a guarantee of {wanted} asked for, and a session of the tenant '{tenant}' with its limit can be guaranteed {most} of a device (`guarantee_max` of its [[tenant]], or of all who are none, in the daemon's configuration)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::Flags;

    fn config() -> Config {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stitchd.toml");
        let text = "session_limit = '3GiB'\npriority_max = 1\n[[tenant]]\nname = 'web'\nuids = [1001]\nguarantee = '1GiB'\nlimit = '2GiB'\nlend = false\npriority = 7\n\
            [[tenant]]\nname = 'batch'\npods = ['11111111-2222-3333-4444-555555555555']\n[[tenant]]\nname = 'any'\n";
        std::fs::write(&path, text).unwrap();
        Config::load(Some(&path), &Flags::default()).unwrap()
    }

    fn seat(uid: u32, pod: Option<&str>, tenant: &str, limit: Bytes, priority: u32) -> Result<Seated, String> {
        config().seat_of(uid, pod, &wish(tenant, limit, priority), Bytes::gib(16))
    }

    fn wish(tenant: &str, limit: Bytes, priority: u32) -> Wish<'_> {
        Wish { tenant, limit, priority, guarantee: None, answers: true }
    }

    #[test]
    fn a_session_is_guaranteed_what_it_asks_for_up_to_what_its_tenant_may_be() {
        let of = |config: &Config, uid, guarantee: Bytes| {
            let guarantee = Some(guarantee).filter(|bytes| !bytes.is_zero());
            let wish = Wish { guarantee, ..wish("", Bytes::ZERO, 0) };
            let seated = config.seat_of(uid, None, &wish, Bytes::gib(16));
            seated.map(|seated| (seated.guarantee, seated.guarantee_max))
        };
        let mut config = config();
        let (gib, none) = (Bytes::gib, Bytes::ZERO);
        assert_eq!(of(&config, 1001, none), Ok((gib(1), gib(1))), "its tenant's, which is the most where nobody says");
        assert_eq!(of(&config, 1001, Bytes::mib(8)), Ok((Bytes::mib(8), gib(1))));
        assert!(
            of(&config, 1001, gib(2)).unwrap_err().contains("tenant 'web' with its limit can be guaranteed 1.00 GiB")
        );
        config.tenants[0].guarantee_max = gib(8);
        assert_eq!(of(&config, 1001, gib(2)), Ok((gib(2), gib(2))), "no more than its limit");
        assert!(of(&config, 5, gib(1)).unwrap_err().contains("'uid:5' with its limit can be guaranteed 0 B"));
        config.guarantee_max = Some(gib(2));
        assert_eq!(of(&config, 5, gib(1)), Ok((gib(1), gib(2))));
        (config.guarantee_max, config.tenants) = (None, Vec::new());
        assert_eq!(of(&config, 5, none), Ok((none, gib(3))), "where there are no tenants anybody can be, to his limit");
        config.borrowed = Overstay::End;
        assert!(of(&config, 5, gib(1)).is_err(), "nobody has others' processes ended who was not named");
    }

    #[test]
    fn a_session_is_whose_its_user_or_pod_is_and_nobody_elses() {
        let (none, pod) = (Bytes::ZERO, Some("11111111-2222-3333-4444-555555555555"));
        let whose = |uid, pod, tenant| seat(uid, pod, tenant, none, 0).map(|seated| seated.tenant);
        assert_eq!(whose(1001, None, "").unwrap(), "web");
        assert_eq!(whose(0, pod, "").unwrap(), "batch");
        assert_eq!(whose(5, None, "").unwrap(), "uid:5");
        assert_eq!(whose(5, Some("x"), "").unwrap(), "pod:x");
        assert_eq!(whose(5, None, "any").unwrap(), "any", "it is open to all");
        assert_eq!(whose(5, None, "uid:5").unwrap(), "uid:5");
        assert_eq!(whose(1001, None, "uid:1001").unwrap(), "web", "nobody leaves his tenant by naming himself");
        assert!(whose(1001, None, "any").unwrap_err().contains("which is the tenant 'web'"));
        assert!(whose(5, None, "web").unwrap_err().contains("(uid:5) is none of the users"));
        assert!(whose(5, None, "uid:6").unwrap_err().contains("no tenant 'uid:6'"));
        assert!(whose(5, None, "nobody").unwrap_err().contains("no tenant 'nobody'"));
    }

    #[test]
    fn what_a_session_asks_for_is_held_against_what_its_tenant_has() {
        let terms = |uid, limit, priority| seat(uid, None, "", limit, priority).unwrap();
        let web = terms(1001, Bytes::ZERO, 0);
        assert_eq!((web.guarantee, web.terms.limit, web.terms.priority), (Bytes::gib(1), Bytes::gib(2), 7));
        assert!(!web.terms.lends && web.terms.answers);
        assert_eq!(terms(1001, Bytes::mib(8), 0).guarantee, Bytes::mib(8), "no more than its limit");
        let greedy = terms(1001, Bytes::gib(9), 99).terms;
        assert_eq!((greedy.limit, greedy.priority), (Bytes::gib(2), 7));
        assert_eq!(terms(1001, Bytes::gib(1), 2).terms.priority, 2);
        let nobody = terms(5, Bytes::ZERO, 9);
        assert_eq!((nobody.guarantee, nobody.terms.limit), (Bytes::ZERO, Bytes::gib(3)));
        assert_eq!((nobody.terms.priority, nobody.terms.lends), (1, true));
        assert_eq!(terms(5, Bytes::gib(9), 0).terms.limit, Bytes::gib(9), "a default is no limit");
        assert_eq!(terms(5, Bytes::gib(99), 0).terms.limit, Bytes::gib(16));
    }
}
