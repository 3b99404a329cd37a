//! Where a session's process runs, in Kubernetes' words. A container is told by its manifest what it is called, and tells the daemon; the daemon sees of which pod a process is, by its control group, and believes the names of
//! no other pod. So nobody is asked for them: no API server, and no right to read it.
//!
//! Not for: deciding anything. They are for people and metrics.

use super::registry::Entry;
use crate::wire::convert::{Malformed, pod_name};
use crate::wire::peer::{Peer, pod_of};
use crate::wire::v1;

/// What a container is called.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct PodNames {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) container: String,
}

impl PodNames {
    /// What `said` says, where the process is `seen` in that pod.
    fn of(said: &v1::Pod, seen: Option<&str>) -> Result<Option<PodNames>, Malformed> {
        if seen != Some(said.uid.as_str()) {
            return Ok(None);
        }
        Ok(Some(PodNames {
            namespace: pod_name("pod.namespace", &said.namespace)?,
            pod: pod_name("pod.name", &said.name)?,
            container: pod_name("pod.container", &said.container)?,
        }))
    }
}

impl Entry {
    /// Its process has said where it runs.
    pub(super) fn note_pod(&self, peer: &Peer, said: Option<&v1::Pod>) {
        let Some(said) = said else { return };
        let seen = pod_of(peer.pid);
        match PodNames::of(said, seen.as_deref()) {
            // One that is there again says the same as before.
            Ok(Some(names)) => drop(self.pod.set(names)),
            Ok(None) => {
                tracing::debug!(session = %self.id, pid = peer.pid, said = said.uid, seen, "names of a pod in which the process is not seen are not shown");
            }
            Err(error) => tracing::debug!(session = %self.id, %error, "the names of its pod are none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_believed_of_the_pod_that_the_process_is_seen_in_and_of_no_other() {
        let uid = "0a1b2c3d-1111-2222-3333-444455556666";
        let said =
            v1::Pod { uid: uid.into(), namespace: "ml\n".into(), name: "job-0".into(), container: "train".into() };
        let names = PodNames { namespace: "ml\u{fffd}".into(), pod: "job-0".into(), container: "train".into() };
        assert_eq!(PodNames::of(&said, Some(uid)), Ok(Some(names)));
        assert_eq!(PodNames::of(&said, None), Ok(None));
        assert_eq!(PodNames::of(&said, Some("0a1b2c3d-1111-2222-3333-444455556667")), Ok(None));
        assert_eq!(PodNames::of(&v1::Pod::default(), None), Ok(None));
        let long = v1::Pod { name: "x".repeat(254), ..said };
        assert!(PodNames::of(&long, Some(uid)).unwrap_err().to_string().contains("254 bytes; at most 253"));
    }
}
