//! Sessions at the moment of a scrape, by who they are. Sessions of the same names are one series, and of very many the last are one together: what a scrape costs has a bound, and
//! series do not come and go with what somebody calls his sessions.

use std::collections::{BTreeMap, BTreeSet};

use metrics::{Label, counter, gauge};

use super::{ByDevice, DEVIATIONS, SERVED, uuid_label};
use crate::daemon::pods::PodNames;
use crate::daemon::{Daemon, NodeDevice};
use crate::ids::DeviceId;
use crate::ledger::SessionView;
use crate::limits;
use crate::runtime::Counter;
use crate::units::Bytes;

/// What stands for whoever is not listed by name.
const OTHERS: &str = "_other";

/// One session at the moment of a scrape.
pub(in crate::daemon) struct SessionFigures {
    who: Who,
    pub(in crate::daemon) view: SessionView,
    pub(super) counters: ByDevice,
}

/// The names of a session.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Who {
    tenant: String,
    namespace: String,
    pod: String,
    container: String,
    session: String,
}

impl Who {
    #[cfg(test)]
    fn nobody() -> Who {
        let none = String::new;
        Who { tenant: none(), namespace: none(), pod: none(), container: none(), session: none() }
    }

    fn others() -> Who {
        let other = || OTHERS.to_owned();
        Who { tenant: other(), namespace: other(), pod: other(), container: other(), session: other() }
    }

    fn labels(&self, device: &NodeDevice, label: &'static str, value: &'static str) -> Vec<Label> {
        vec![
            uuid_label(device),
            Label::new("tenant", self.tenant.clone()),
            Label::new("client_namespace", self.namespace.clone()),
            Label::new("client_pod", self.pod.clone()),
            Label::new("client_container", self.container.clone()),
            Label::new("session", self.session.clone()),
            Label::new(label, value),
        ]
    }
}

impl SessionFigures {
    pub(in crate::daemon) fn get(&self, device: DeviceId, counter: Counter) -> u64 {
        self.counters.get(&device).map_or(0, |counters| counters[counter as usize])
    }
}

impl Daemon {
    /// Every session, the oldest first.
    pub(in crate::daemon) fn session_figures(&self) -> Vec<SessionFigures> {
        let mut figures = Vec::new();
        for view in self.steward.sessions() {
            // A session that ends at this moment is in one list and not in the other.
            let Some(entry) = self.registry.get(view.session) else { continue };
            let device = view.held.iter().max_by_key(|(_, held)| *held).map(|(device, _)| *device);
            let counters = self.counters_by_device(&entry, device.unwrap_or_else(|| self.home()));
            let PodNames { namespace, pod, container } = entry.pod.get().cloned().unwrap_or_default();
            let who = Who { tenant: entry.tenant.clone(), namespace, pod, container, session: entry.name.clone() };
            figures.push(SessionFigures { who, view, counters });
        }
        figures
    }
}

/// What sessions of the same names have on a device, together.
#[derive(Default)]
struct Together {
    bytes: [u64; KINDS.len()],
    served: [u64; SERVED.len()],
    deviations: [u64; DEVIATIONS.len()],
}

const KINDS: [&str; 7] = ["guarantee", "limit", "leased", "live", "requested", "occupied", "parked"];

impl Together {
    fn add(&mut self, session: &SessionFigures, device: DeviceId, held: Bytes, guarantee: Bytes) {
        let own = |counter| session.get(device, counter);
        let live = own(Counter::LiveBytes);
        let bytes = [
            guarantee.get(),
            session.view.terms.limit.get(),
            held.get(),
            live,
            live,
            own(Counter::OccupiedBytes),
            own(Counter::StitchableBytes),
        ];
        let sum = |sums: &mut [u64], more: &[u64]| {
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
        };
        sum(&mut self.bytes, &bytes);
        sum(&mut self.served, &SERVED.map(|(_, of)| own(of)));
        sum(&mut self.deviations, &DEVIATIONS.map(|(_, of)| own(of)));
    }
}

pub(super) fn record_sessions(devices: &[NodeDevice], sessions: &[SessionFigures]) {
    let mut listed: BTreeSet<&Who> = BTreeSet::new();
    let mut unlisted = 0_u64;
    let mut together: BTreeMap<(DeviceId, Who), Together> = BTreeMap::new();
    for session in sessions {
        // The oldest are listed: they stay so, whoever comes.
        let is_listed =
            listed.contains(&session.who) || listed.len() < limits::SESSION_SERIES_MAX && listed.insert(&session.who);
        unlisted += u64::from(!is_listed);
        for device in devices {
            let of = |list: &[(DeviceId, Bytes)]| list.iter().find(|(of, _)| *of == device.id).map(|(_, bytes)| *bytes);
            let held = of(&session.view.held).unwrap_or(Bytes::ZERO);
            let guarantee = of(&session.view.guarantees).unwrap_or(Bytes::ZERO);
            if held.is_zero() && guarantee.is_zero() && !session.counters.contains_key(&device.id) {
                continue;
            }
            let who = if is_listed { session.who.clone() } else { Who::others() };
            together.entry((device.id, who)).or_default().add(session, device.id, held, guarantee);
        }
    }
    gauge!("stitchd_sessions_unlisted").set(unlisted as f64);
    for ((device, who), sum) in &together {
        let Some(device) = devices.iter().find(|known| known.id == *device) else { continue };
        for (kind, bytes) in KINDS.iter().zip(sum.bytes) {
            gauge!("stitchd_session_bytes", who.labels(device, "kind", kind)).set(bytes as f64);
        }
        for ((served, _), count) in SERVED.iter().zip(sum.served) {
            counter!("stitchd_session_requests_total", who.labels(device, "served", served)).absolute(count);
        }
        for ((kind, _), count) in DEVIATIONS.iter().zip(sum.deviations) {
            counter!("stitchd_session_plan_deviations_total", who.labels(device, "kind", kind)).absolute(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use metrics::with_local_recorder;
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use crate::ids::{DeviceUuid, SessionId};
    use crate::ledger::Terms;

    fn session(number: u64, name: &str) -> SessionFigures {
        let who = Who { session: name.to_owned(), tenant: "t".to_owned(), ..Who::nobody() };
        let mut ledger = crate::ledger::Ledger::new();
        let total = Bytes::gib(1);
        ledger.step(crate::ledger::Command::AddDevice { device: DeviceId(0), total, chunks_max: 8 }).unwrap();
        let (id, terms) = (SessionId(number), Terms::new(total, 0));
        ledger.step(crate::ledger::Command::Open { session: id, terms }).unwrap();
        let mut counters = [0; crate::limits::COUNTERS_MAX];
        counters[Counter::LiveBytes as usize] = 1;
        let view = ledger.session(id).unwrap();
        SessionFigures { who, view, counters: ByDevice::from([(DeviceId(0), counters)]) }
    }

    fn render(sessions: &[SessionFigures]) -> String {
        let (id, uuid, model) = (DeviceId(0), DeviceUuid([0; 16]), String::new());
        let device = NodeDevice { id, uuid, model, total: Bytes::gib(1), is_mps: false };
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, || record_sessions(&[device], sessions));
        recorder.handle().render()
    }

    fn live<'a>(text: &'a str, session: &str) -> Vec<&'a str> {
        let is_it = |line: &&str| line.contains(&format!("session=\"{session}\",kind=\"live\""));
        text.lines().filter(is_it).filter_map(|line| line.rsplit(' ').next()).collect()
    }

    #[test]
    fn so_many_names_are_listed_and_who_comes_later_is_one_with_the_others() {
        let mut sessions: Vec<_> = (0..300).map(|number| session(number, &format!("s{number}"))).collect();
        // One more of a name that is listed.
        sessions.push(session(300, "s0"));
        let text = render(&sessions);
        assert_eq!([live(&text, "s0"), live(&text, "s255")], [vec!["2"], vec!["1"]]);
        assert_eq!((live(&text, "s256"), live(&text, OTHERS)), (vec![], vec!["44"]));
        assert!(text.contains("stitchd_sessions_unlisted 44"));
        assert_eq!(text.matches("kind=\"live\"").count(), limits::SESSION_SERIES_MAX + 1);
    }

    #[test]
    fn what_somebody_calls_himself_makes_no_line_and_no_label_of_its_own() {
        let text = render(&[session(1, "\"} 1\nstitchd_fake 99\n\\")]);
        assert!(!text.lines().any(|line| line.starts_with("stitchd_fake")), "{text}");
        assert!(text.contains(r#"session="\"} 1\nstitchd_fake 99\n\\",kind="live"} 1"#), "{text}");
    }
}
