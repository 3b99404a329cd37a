//! Sessions at the moment of a scrape, by who they are. Sessions of the same names are one series, and of very many the last are one together: what a scrape costs has a bound, and
//! series do not come and go with what somebody calls his sessions.

use std::collections::BTreeMap;

use metrics::gauge;

use super::families::{self, Kind, Labels};
use super::{ByDevice, CounterSet, DEVIATIONS, SERVED, cap_by_books};
use crate::daemon::pods::PodNames;
use crate::daemon::{Daemon, NodeDevice};
use crate::ids::DeviceId;
use crate::ledger::SessionView;
use crate::runtime::Counter;
use crate::units::Bytes;

/// What stands for whoever is not listed by name.
const OTHERS: &str = "_other";

/// One session at the moment of a scrape.
pub(in crate::daemon) struct SessionFigures {
    /// By which name it is listed.
    who: Who,
    pub(in crate::daemon) view: SessionView,
    pub(super) counters: ByDevice,
}

/// The names of a session.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Who {
    tenant: String,
    namespace: String,
    pod: String,
    container: String,
    session: String,
}

impl Who {
    /// Somebody in no pod, of no tenant.
    #[cfg(test)]
    pub(super) fn of_session(name: &str) -> Who {
        let none = String::new;
        Who { tenant: none(), namespace: none(), pod: none(), container: none(), session: name.to_owned() }
    }

    pub(super) fn others() -> Who {
        let other = || OTHERS.to_owned();
        Who { tenant: other(), namespace: other(), pod: other(), container: other(), session: other() }
    }

    fn labels(&self, device: &NodeDevice) -> Labels {
        Labels::default()
            .and("UUID", &device.uuid.to_string())
            .and("tenant", &self.tenant)
            .and("client_namespace", &self.namespace)
            .and("client_pod", &self.pod)
            .and("client_container", &self.container)
            .and("session", &self.session)
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
            let home = Daemon::home_of(&view.held).unwrap_or_else(|| self.home());
            let PodNames { namespace, pod, container } = entry.pod.get().cloned().unwrap_or_default();
            let who = Who { tenant: entry.tenant.clone(), namespace, pod, container, session: entry.name.clone() };
            let is_over = || self.registry.get(view.session).is_none();
            let looked = self.tally.look(view.session, who, home, is_over, || self.sets_of(&entry));
            let Some((who, mut counters)) = looked else { continue };
            cap_by_books(&mut counters, &view.held);
            figures.push(SessionFigures { who, view, counters });
        }
        figures
    }
}

/// What sessions of the same names have on a device, together.
type Together = [u64; KINDS.len()];

const KINDS: [&str; 7] = ["guarantee", "limit", "leased", "live", "requested", "occupied", "parked"];

fn sum_up(together: &mut Together, session: &SessionFigures, device: DeviceId, held: Bytes, guarantee: Bytes) {
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
    together.iter_mut().zip(bytes).for_each(|(sum, more)| *sum = sum.saturating_add(more));
}

/// Writes the series of sessions, with what each name has counted on the device.
pub(super) fn write_sessions(
    out: &mut String,
    devices: &[NodeDevice],
    sessions: &[SessionFigures],
    counted: &BTreeMap<Who, ByDevice>,
) {
    let mut together: BTreeMap<(DeviceId, &Who), Together> = BTreeMap::new();
    for session in sessions {
        for device in devices {
            let of = |list: &[(DeviceId, Bytes)]| list.iter().find(|(of, _)| *of == device.id).map(|(_, bytes)| *bytes);
            let held = of(&session.view.held).unwrap_or(Bytes::ZERO);
            let guarantee = of(&session.view.guarantees).unwrap_or(Bytes::ZERO);
            if held.is_zero() && guarantee.is_zero() && !session.counters.contains_key(&device.id) {
                continue;
            }
            sum_up(together.entry((device.id, &session.who)).or_default(), session, device.id, held, guarantee);
        }
    }
    let rows: Vec<(Labels, (Together, Option<&CounterSet>))> = together
        .iter()
        .filter_map(|((device, who), sum)| {
            let known = devices.iter().find(|known| known.id == *device)?;
            Some((
                who.labels(known),
                (*sum, counted.get(who).and_then(|counted| counted.get(device)).map(|set| &**set)),
            ))
        })
        .collect();
    families::write(out, ("stitchd_session_bytes", Kind::Gauge), &rows, ("kind", &KINDS), |(sum, _), at| sum[at]);
    for (name, label, of) in [
        ("stitchd_session_requests_total", "served", &SERVED[..]),
        ("stitchd_session_plan_deviations_total", "kind", &DEVIATIONS[..]),
    ] {
        let values: Vec<&str> = of.iter().map(|(value, _)| *value).collect();
        families::write(out, (name, Kind::Counter), &rows, (label, &values), |(_, counted), at| {
            counted.map_or(0, |counted| counted[of[at].1 as usize])
        });
    }
}

/// Sessions that are shown together with others.
pub(super) fn record_unlisted(sessions: &[SessionFigures]) {
    let others = Who::others();
    let unlisted = sessions.iter().filter(|session| session.who == others).count();
    gauge!("stitchd_sessions_unlisted").set(unlisted as f64);
}

#[cfg(test)]
mod tests {
    use metrics::with_local_recorder;
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use crate::daemon::metrics::Tally;
    use crate::ids::{DeviceUuid, SessionId};
    use crate::ledger::Terms;
    use crate::limits;

    fn session(number: u64, name: &str) -> SessionFigures {
        let who = Who { tenant: "t".to_owned(), ..Who::of_session(name) };
        let mut ledger = crate::ledger::Ledger::new();
        let total = Bytes::gib(1);
        ledger.step(crate::ledger::Command::AddDevice { device: DeviceId(0), total, chunks_max: 8 }).unwrap();
        let (id, terms) = (SessionId(number), Terms::new(total, 0));
        ledger.step(crate::ledger::Command::Open { session: id, terms }).unwrap();
        let mut counters = [0; crate::limits::COUNTERS_MAX];
        counters[Counter::LiveBytes as usize] = 1;
        let view = ledger.session(id).unwrap();
        SessionFigures { who, view, counters: ByDevice::from([(DeviceId(0), Box::new(counters))]) }
    }

    fn render(mut sessions: Vec<SessionFigures>) -> String {
        let tally = Tally::default();
        for session in &mut sessions {
            let looked = tally.look(session.view.session, session.who.clone(), DeviceId(0), || false, || None);
            session.who = looked.unwrap().0;
        }
        let (id, uuid, model) = (DeviceId(0), DeviceUuid([0; 16]), String::new());
        let device = NodeDevice { id, uuid, model, total: Bytes::gib(1), is_mps: false };
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, || record_unlisted(&sessions));
        let mut text = recorder.handle().render();
        write_sessions(&mut text, &[device], &sessions, &tally.names());
        text
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
        let text = render(sessions);
        assert_eq!([live(&text, "s0"), live(&text, "s255")], [vec!["2"], vec!["1"]]);
        assert_eq!((live(&text, "s256"), live(&text, OTHERS)), (vec![], vec!["44"]));
        assert!(text.contains("stitchd_sessions_unlisted 44"));
        assert_eq!(text.matches("kind=\"live\"").count(), limits::SESSION_SERIES_MAX + 1);
    }

    #[test]
    fn what_somebody_calls_himself_makes_no_line_and_no_label_of_its_own() {
        let text = render(vec![session(1, "\"} 1\nstitchd_fake 99\n\\")]);
        assert!(!text.lines().any(|line| line.starts_with("stitchd_fake")), "{text}");
        assert!(text.contains(r#"session="\"} 1\nstitchd_fake 99\n\\",kind="live"} 1"#), "{text}");
    }
}
