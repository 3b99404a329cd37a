//! What a daemon is told: a TOML file, and flags that override it.
//!
//! ```toml
//! driver = "auto"                 # auto, cuda, hip, host, sim
//! runtime_dir = "/run/stitchd"    # sockets and lock
//! state_dir = "/run/stitchd"      # the journal and the keeper's socket: in no container but the daemon's own
//! http = "127.0.0.1:9464"         # /metrics, /livez, /readyz; off when absent
//! ladder = "auto"                 # or sizes of chunks, ["2MiB", "32MiB", "256MiB"], or "measured"
//! drain = "2s"
//! driver_deadline = "30s"         # a driver call that takes longer has failed
//! wait = "5s"                     # how long a session that grows waits for others
//! plans_max = "1GiB"              # bytes that all stored plans may have
//! linger_max = "1h"               # how long a shared range may outlive its last holder
//! keeper = "process"              # who holds what outlives a daemon that is killed: a process of its own, "systemd", or "none"
//! keeper_linger = "2m"            # how long it does while there is no daemon, and none of the processes is left that had a session
//! borrowed = "refuse"             # or wait, end: when what is guaranteed is lent and does not come back
//!
//! [[tenant]]
//! name = "inference"
//! uids = [1001]                   # whose sessions are its own
//! guarantee = "20GiB"             # of a device, for each session
//! guarantee_max = "60GiB"         # the most that one may ask for
//!
//! [[device]]
//! ordinal = 0                     # or uuid = "GPU-…", which is the same device after the next start of the machine, too
//! bytes = "16GiB"                 # how large a pretended device is; of a GPU, how much the daemon takes at most
//! ```

mod written;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::driver::{DeviceDescription, DriverName};
use crate::ids::DeviceUuid;
use crate::keeper::manager::Passed;
use crate::ladder::{Ladder, LadderError};
use crate::ledger::Overstay;
use crate::limits;
use crate::session::locate;
use crate::units::{Bytes, parse_time};
use crate::wire::peer::is_pod_uid;

/// Bytes of a pretended device that nobody gave a size.
const PRETENDED_DEVICE: Bytes = Bytes::gib(16);

/// Driver calls take microseconds to milliseconds; one that takes so long will not come back soon.
const DRIVER_DEADLINE: Duration = Duration::from_secs(30);

/// A job that has no memory left and shares its device had better wait for a moment than fail.
const WAIT: Duration = Duration::from_secs(5);

/// As many as there may be of a large job each, and no more than a runtime directory in memory has to spare.
const PLANS_MAX: Bytes = Bytes::gib(1);

/// Whoever publishes for the next process of a job is followed within that.
const LINGER_MAX: Duration = Duration::from_secs(3_600);

/// A daemon that is restarted is there within that.
const KEEPER_LINGER: Duration = Duration::from_secs(120);

/// What a daemon does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Which driver.
    pub driver: DriverName,
    /// Where the sockets and the lock are.
    pub runtime_dir: PathBuf,
    /// Where the journal and the keeper's socket are ([`Config::state_dir`]), where they are not with the others.
    pub state_dir: Option<PathBuf>,
    /// Where metrics and health are served over HTTP.
    pub http: Option<SocketAddr>,
    /// The devices to own; all that the driver has when empty.
    pub devices: Vec<DeviceConfig>,
    /// Chunk sizes; where they are to be measured, those for a machine on which that cannot be done.
    pub ladder: Ladder,
    /// Whether these are they.
    pub ladder_is: LadderIs,
    /// Bytes that a session may hold when it does not say; `None` for all there are.
    pub session_limit: Option<Bytes>,
    /// Bytes of a device that a session which is of no tenant of this configuration can be guaranteed; where nobody says, all if there are no tenants, else none.
    pub guarantee_max: Option<Bytes>,
    /// Bytes per device that are created ahead of need, in the chunks by which sessions grow.
    pub warm: Bytes,
    /// The highest priority that a session can have, whatever it asks for.
    pub priority_max: u32,
    /// How long sessions may go on once the daemon is to end.
    pub drain: Duration,
    /// How long a driver call may take.
    pub driver_deadline: Duration,
    /// Access to the sockets, as chmod writes it.
    pub socket_mode: u32,
    /// The group that the sockets and their directory are given to; the daemon's own where there is none.
    pub socket_group: Option<u32>,
    /// Where plans are stored; in the runtime directory when not given.
    pub plans: Option<PathBuf>,
    /// Bytes that all of them may have.
    pub plans_max: Bytes,
    /// How long a session that grows waits for others, unless it says so itself.
    pub wait: Duration,
    /// How long a shared range may outlive its last holder, whatever it is published with.
    pub linger_max: Duration,
    /// Who holds what is to outlive a daemon that is killed.
    pub keeper: KeeperIs,
    /// What the service manager says that has started this process.
    pub manager: Passed,
    /// How long it does while there is no daemon, and no process of a session.
    pub keeper_linger: Duration,
    /// What becomes of a request within a guarantee when others do not give back in time what was lent to them.
    pub borrowed: Overstay,
    /// Users that may act on the daemon, beside root and its own.
    pub admins: Vec<u32>,
    /// Whose sessions have which terms.
    pub tenants: Vec<TenantConfig>,
}

/// Who holds what is to outlive a daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeeperIs {
    /// A process: one that is there, else one that the daemon starts.
    Process,
    /// The service manager that has started the daemon.
    Manager,
    /// Nobody: what a daemon holds ends with it.
    None,
}

/// Where the ladder comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LadderIs {
    /// From the configuration.
    Listed,
    /// The daemon measures what calls cost when it starts, and takes the ladder that follows.
    Measured,
    /// The usual one, without what is too small for the open files that the daemon may have.
    Auto,
}

/// What the sessions of a tenant may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantConfig {
    /// What people call it.
    pub name: String,
    /// Users whose sessions are its own; everybody may say that he is where there is none, and no pod.
    pub uids: Vec<u32>,
    /// Pods whose sessions are its own, by the UID that Kubernetes gives them.
    pub pods: Vec<String>,
    /// Bytes that a session of it may never pass.
    pub limit: Option<Bytes>,
    /// Bytes of a device that a session of it is guaranteed if it does not ask for something else.
    pub guarantee: Bytes,
    /// The most that it can be.
    pub guarantee_max: Bytes,
    /// Whether what it does not use of that is lent.
    pub lends: bool,
    /// The place of its sessions, and the highest that they can have.
    pub priority: u32,
}

/// How a device is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The driver's ordinal, from 0.
    Ordinal(u32),
    /// Its UUID.
    Uuid(DeviceUuid),
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Which::Ordinal(ordinal) => write!(f, "{ordinal}"),
            Which::Uuid(uuid) => write!(f, "{uuid}"),
        }
    }
}

/// One device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// By the driver's ordinal, or by name.
    pub which: Which,
    /// Its bytes, where the driver only pretends; else the most that the daemon takes of it.
    pub bytes: Option<Bytes>,
}

/// A configuration that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("the configuration {path} is wrong: {reason}")]
    Parse {
        /// Which.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A value is impossible.
    #[error("{key}: {reason}")]
    Value {
        /// Of which key or flag.
        key: &'static str,
        /// Why.
        reason: String,
    },
    /// The chunk sizes make no ladder.
    #[error("ladder")]
    Ladder(#[from] LadderError),
}

/// The file. Everything may be left out.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct File {
    driver: Option<String>,
    runtime_dir: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    http: Option<String>,
    ladder: Option<FileLadder>,
    session_limit: Option<String>,
    guarantee_max: Option<String>,
    warm: Option<String>,
    priority_max: Option<u32>,
    drain: Option<String>,
    driver_deadline: Option<String>,
    socket_mode: Option<String>,
    socket_group: Option<String>,
    plans: Option<PathBuf>,
    plans_max: Option<String>,
    wait: Option<String>,
    linger_max: Option<String>,
    keeper: Option<String>,
    keeper_linger: Option<String>,
    borrowed: Option<String>,
    admins: Option<Vec<u32>>,
    // Written only if there are some: people append tables to what --print-config prints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    device: Vec<FileDevice>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tenant: Vec<FileTenant>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FileTenant {
    name: String,
    #[serde(default)]
    uids: Vec<u32>,
    #[serde(default)]
    pods: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<String>,
    guarantee: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guarantee_max: Option<String>,
    lend: Option<bool>,
    priority: Option<u32>,
}

/// The words for [`KeeperIs`].
const KEEPERS: [(&str, KeeperIs); 3] =
    [("process", KeeperIs::Process), ("systemd", KeeperIs::Manager), ("none", KeeperIs::None)];

/// The words for [`Overstay`].
const BORROWED: [(&str, Overstay); 3] =
    [("refuse", Overstay::Refuse), ("wait", Overstay::Wait), ("end", Overstay::End)];

impl FileTenant {
    fn read(self) -> Result<TenantConfig, ConfigError> {
        let is_name = !self.name.is_empty() && self.name.len() <= limits::NAME_LEN_MAX;
        if !is_name || self.name.contains(|c: char| c.is_control()) || self.name.contains(':') {
            let text = format!("'{}' is no name: 1 to {} bytes, without ':'", self.name, limits::NAME_LEN_MAX);
            return Err(value("tenant.name", text));
        }
        let pods = self.pods.iter().map(|text| pod("tenant.pods", text)).collect::<Result<Vec<_>, _>>()?;
        let guarantee = self.guarantee.map_or(Ok(Bytes::ZERO), |text| size("tenant.guarantee", &text))?;
        let guarantee_max = self.guarantee_max.map_or(Ok(guarantee), |text| size("tenant.guarantee_max", &text))?;
        Ok(TenantConfig {
            name: self.name,
            uids: self.uids,
            pods,
            limit: self.limit.map(|text| size("tenant.limit", &text)).transpose()?,
            guarantee,
            guarantee_max,
            lends: self.lend.unwrap_or(true),
            priority: self.priority.unwrap_or(0),
        })
    }

    fn of(tenant: &TenantConfig) -> FileTenant {
        let exact = |bytes: Bytes| bytes.get().to_string();
        FileTenant {
            name: tenant.name.clone(),
            uids: tenant.uids.clone(),
            pods: tenant.pods.clone(),
            limit: tenant.limit.map(exact),
            guarantee: Some(tenant.guarantee).filter(|bytes| !bytes.is_zero()).map(exact),
            guarantee_max: Some(tenant.guarantee_max).filter(|most| *most != tenant.guarantee).map(exact),
            lend: Some(tenant.lends),
            priority: Some(tenant.priority),
        }
    }
}

/// A word, or sizes.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged, expecting = "ladder is a list of sizes such as [\"2MiB\", \"32MiB\"], \"auto\" or \"measured\"")]
enum FileLadder {
    Word(String),
    Steps(Vec<String>),
}

/// The words by which the daemon is told to measure, and to see for itself.
const MEASURED: &str = "measured";
const AUTO: &str = "auto";

impl FileLadder {
    /// The steps, and where they come from.
    fn read(&self) -> Result<(Ladder, LadderIs), ConfigError> {
        match self {
            FileLadder::Steps(steps) => {
                let steps = steps.iter().map(|step| size("ladder", step)).collect::<Result<_, _>>()?;
                Ok((Ladder::new(steps)?, LadderIs::Listed))
            }
            FileLadder::Word(word) if word == MEASURED => Ok((Ladder::standard(), LadderIs::Measured)),
            FileLadder::Word(word) if word == AUTO => Ok((Ladder::standard(), LadderIs::Auto)),
            FileLadder::Word(word) => {
                let text = format!("'{word}' is neither a list of sizes nor \"{AUTO}\" or \"{MEASURED}\"");
                Err(value("ladder", text))
            }
        }
    }
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FileDevice {
    ordinal: Option<u32>,
    uuid: Option<String>,
    bytes: Option<String>,
}

/// What the command line says; whatever is given wins over the file.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--driver`
    pub driver: Option<String>,
    /// `--runtime-dir`
    pub runtime_dir: Option<PathBuf>,
    /// Where the journal and the keeper's socket are.
    pub state_dir: Option<PathBuf>,
    /// `--http`
    pub http: Option<String>,
    /// `--device`, any number of times
    pub devices: Vec<String>,
}

impl Config {
    /// Reads the file, if there is one, and lets flags override it.
    pub fn load(file: Option<&Path>, flags: &Flags) -> Result<Config, ConfigError> {
        let written = match file {
            None => File::default(),
            Some(path) => {
                let read = |source| ConfigError::Read { path: path.to_owned(), source };
                let text = std::fs::read_to_string(path).map_err(read)?;
                let parse = |error: toml::de::Error| {
                    let mut reason = error.to_string();
                    if reason.contains("expected u32") {
                        reason.push_str("users are numbers (uids), ordinals and priorities too: admins = [1000]");
                    }
                    if reason.contains("expected a string") {
                        reason.push_str("times, sizes, modes and names are written in quotes and with their units: wait = \"5s\", warm = \"1GiB\", socket_mode = \"660\"");
                    }
                    if reason.contains("expected a sequence") {
                        reason.push_str("there may be several of these, each under a heading of its own in double brackets: [[tenant]], [[device]]");
                    }
                    ConfigError::Parse { path: path.to_owned(), reason }
                };
                toml::from_str(&text).map_err(parse)?
            }
        };
        Config::merge(written, flags)
    }

    fn merge(file: File, flags: &Flags) -> Result<Config, ConfigError> {
        let driver = flags.driver.as_ref().or(file.driver.as_ref()).map_or("auto", String::as_str);
        let http = flags.http.as_ref().or(file.http.as_ref());
        let mut devices: Vec<DeviceConfig> = Vec::new();
        if flags.devices.is_empty() {
            for device in &file.device {
                let which = match (device.ordinal, &device.uuid) {
                    (Some(ordinal), None) if ordinal < limits::ORDINALS_MAX => Which::Ordinal(ordinal),
                    (Some(ordinal), None) => {
                        return Err(value("device.ordinal", format!("{ordinal} is above any machine's")));
                    }
                    (None, Some(text)) => Which::Uuid(DeviceUuid::parse(text.trim()).ok_or_else(|| {
                        value(
                            "device.uuid",
                            format!("'{text}' is no UUID, such as GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
                        )
                    })?),
                    (Some(_), Some(_)) | (None, None) => {
                        return Err(value("device", "each has an ordinal or a uuid, and not both"));
                    }
                };
                let bytes = device.bytes.as_ref().map(|text| device_size("device.bytes", text)).transpose()?;
                devices.push(DeviceConfig { which, bytes });
            }
        }
        for text in &flags.devices {
            devices.push(parse_device(text)?);
        }
        for (at, device) in devices.iter().enumerate() {
            if devices[..at].iter().any(|other| other.which == device.which) {
                return Err(value("device", format!("device {} is there twice", device.which)));
            }
        }
        let tenants = file.tenant.into_iter().map(FileTenant::read).collect::<Result<Vec<_>, _>>()?;
        for (at, tenant) in tenants.iter().enumerate() {
            if tenants[..at].iter().any(|other| other.name == tenant.name) {
                return Err(value("tenant.name", format!("'{}' is there twice", tenant.name)));
            }
            if let Some(limit) = tenant.limit.filter(|limit| *limit < tenant.guarantee) {
                let text = format!("{} of '{}' are more than its limit, {limit}", tenant.guarantee, tenant.name);
                return Err(value("tenant.guarantee", text));
            }
            if tenant.guarantee_max < tenant.guarantee {
                let text = format!(
                    "{} of '{}' are less than its guarantee, {}",
                    tenant.guarantee_max, tenant.name, tenant.guarantee
                );
                return Err(value("tenant.guarantee_max", text));
            }
        }
        let borrowed = file.borrowed.as_deref().unwrap_or(BORROWED[0].0);
        let borrowed = BORROWED.iter().find(|(word, _)| *word == borrowed).map(|(_, overstay)| *overstay);
        let keeper = file.keeper.as_deref().unwrap_or("process");
        let keeper = KEEPERS.iter().find(|(word, _)| *word == keeper).map(|(_, keeper)| *keeper);
        let keeper = keeper.ok_or_else(|| value("keeper", "it is one of process, systemd and none"))?;
        let borrowed = borrowed.ok_or_else(|| value("borrowed", "it is one of refuse, wait and end"))?;
        let runtime_dir = flags.runtime_dir.clone().or(file.runtime_dir);
        let runtime_dir = runtime_dir.unwrap_or_else(|| PathBuf::from(locate::RUNTIME_DIR));
        // Clients and restarts have directories of their own that they begin in.
        let absolute = |name, path: PathBuf| match std::path::absolute(&path) {
            Ok(_) if path.as_os_str().as_encoded_bytes().contains(&0) => Err(value(name, "a path has no byte 0")),
            found => found.map_err(|error| value(name, error)),
        };
        let runtime_dir = absolute("runtime_dir", runtime_dir)?;
        let state_dir = flags.state_dir.clone().or(file.state_dir);
        let state_dir = state_dir.map(|path| absolute("state_dir", path)).transpose()?;
        let ladder = file.ladder.as_ref().map_or_else(|| Ok((Ladder::standard(), LadderIs::Auto)), FileLadder::read);
        let (ladder, ladder_is) = ladder?;
        Ok(Config {
            driver: driver.parse().map_err(|error| value("driver", error))?,
            state_dir,
            runtime_dir,
            http: http.map(|text| parse_address(text)).transpose()?,
            devices,
            ladder,
            ladder_is,
            session_limit: file.session_limit.map(|text| limit("session_limit", &text)).transpose()?,
            // 0 is a way to say that nobody is guaranteed anything.
            guarantee_max: file
                .guarantee_max
                .map(|text| text.parse().map_err(|error| value("guarantee_max", error)))
                .transpose()?,
            warm: file.warm.map_or(Ok(Bytes::ZERO), |text| text.parse().map_err(|error| value("warm", error)))?,
            priority_max: file.priority_max.unwrap_or(0),
            drain: file.drain.map_or(Ok(Duration::from_secs(2)), |text| parse_duration("drain", &text))?,
            driver_deadline: file
                .driver_deadline
                .map_or(Ok(DRIVER_DEADLINE), |text| parse_deadline("driver_deadline", &text))?,
            socket_mode: file.socket_mode.map_or(Ok(0o660), |text| parse_mode(&text))?,
            socket_group: file.socket_group.map(|text| parse_group(&text)).transpose()?,
            plans: file.plans.map(|path| absolute("plans", path)).transpose()?,
            plans_max: file
                .plans_max
                .map_or(Ok(PLANS_MAX), |text| text.parse().map_err(|error| value("plans_max", error)))?,
            wait: file.wait.map_or(Ok(WAIT), |text| parse_duration("wait", &text))?,
            linger_max: file.linger_max.map_or(Ok(LINGER_MAX), |text| parse_duration("linger_max", &text))?,
            keeper,
            manager: Passed::default(),
            keeper_linger: file
                .keeper_linger
                .map_or(Ok(KEEPER_LINGER), |text| parse_duration("keeper_linger", &text))?,
            borrowed,
            admins: file.admins.unwrap_or_default(),
            tenants,
        })
    }

    /// As a file that says the same, with everything spelt out and what it is for.
    pub fn to_toml(&self) -> String {
        written::annotated(&toml::to_string(&self.to_file()).expect("a configuration can always be written"))
    }

    /// The same for programs.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self.to_file()).expect("a configuration can always be written")
    }

    fn to_file(&self) -> File {
        let name = DriverName::ALL.iter().find(|(_, driver)| *driver == self.driver).map_or("auto", |(name, _)| name);
        let exact = |bytes: Bytes| bytes.get().to_string();
        let device = |device: &DeviceConfig| {
            let (ordinal, uuid) = match device.which {
                Which::Ordinal(ordinal) => (Some(ordinal), None),
                Which::Uuid(uuid) => (None, Some(uuid.to_string())),
            };
            FileDevice { ordinal, uuid, bytes: device.bytes.map(exact) }
        };
        File {
            driver: Some(name.to_owned()),
            runtime_dir: Some(self.runtime_dir.clone()),
            state_dir: self.state_dir.clone(),
            http: self.http.map(|address| address.to_string()),
            ladder: Some(match self.ladder_is {
                LadderIs::Measured => FileLadder::Word(MEASURED.to_owned()),
                LadderIs::Auto => FileLadder::Word(AUTO.to_owned()),
                LadderIs::Listed => FileLadder::Steps(self.ladder.steps().iter().map(|step| exact(*step)).collect()),
            }),
            session_limit: self.session_limit.map(exact),
            guarantee_max: self.guarantee_max.map(exact),
            warm: Some(exact(self.warm)),
            priority_max: Some(self.priority_max),
            drain: Some(format!("{}ms", self.drain.as_millis())),
            driver_deadline: Some(format!("{}ms", self.driver_deadline.as_millis())),
            socket_mode: Some(format!("{:o}", self.socket_mode)),
            socket_group: self.socket_group.map(|group| group.to_string()),
            // Not where they would be by default: in a file that is used with another runtime directory they go with that.
            plans: self.plans.clone(),
            plans_max: Some(exact(self.plans_max)),
            wait: Some(format!("{}ms", self.wait.as_millis())),
            linger_max: Some(format!("{}ms", self.linger_max.as_millis())),
            keeper: KEEPERS.iter().find(|(_, keeper)| *keeper == self.keeper).map(|(word, _)| (*word).to_owned()),
            keeper_linger: Some(format!("{}ms", self.keeper_linger.as_millis())),
            borrowed: BORROWED.iter().find(|(_, word)| *word == self.borrowed).map(|(word, _)| (*word).to_owned()),
            admins: Some(self.admins.clone()),
            device: self.devices.iter().map(device).collect(),
            tenant: self.tenants.iter().map(FileTenant::of).collect(),
        }
    }

    /// Bytes of each pretended device, by ordinal.
    pub fn pretended_totals(&self) -> Vec<Bytes> {
        let by_ordinal = |device: &DeviceConfig| match device.which {
            Which::Ordinal(ordinal) => Some((ordinal as usize, device.bytes)),
            // There is one before it has a name.
            Which::Uuid(_) => None,
        };
        let configured: BTreeMap<usize, Option<Bytes>> = self.devices.iter().filter_map(by_ordinal).collect();
        let count = configured.keys().max().map_or(1, |last| last + 1);
        (0..count).map(|ordinal| configured.get(&ordinal).copied().flatten().unwrap_or(PRETENDED_DEVICE)).collect()
    }

    /// The devices to own, of those that are there (ordinals may have gaps, where a device does not answer), each with the most that is taken of it.
    ///
    /// # Errors
    ///
    /// The one that is not there, or is named twice.
    pub(super) fn choose<'a>(
        &self,
        there: &'a [DeviceDescription],
    ) -> Result<Vec<(&'a DeviceDescription, Option<Bytes>)>, Which> {
        if self.devices.is_empty() {
            return Ok(there.iter().map(|device| (device, None)).collect());
        }
        let mut chosen: Vec<(&DeviceDescription, Option<Bytes>)> = Vec::new();
        for DeviceConfig { which, bytes } in &self.devices {
            let is_it = |device: &&DeviceDescription| match which {
                Which::Ordinal(ordinal) => device.id.0 == *ordinal,
                Which::Uuid(uuid) => device.uuid == *uuid,
            };
            let found = there.iter().find(is_it).ok_or(*which)?;
            if chosen.iter().any(|(device, _)| device.id == found.id) {
                return Err(*which);
            }
            chosen.push((found, *bytes));
        }
        Ok(chosen)
    }

    /// Where plans are stored.
    pub(super) fn plan_dir(&self) -> PathBuf {
        self.plans.clone().unwrap_or_else(|| self.runtime_dir.join("plans"))
    }

    /// Where the journal and the keeper's socket are.
    pub fn state_dir(&self) -> &Path {
        self.state_dir.as_deref().unwrap_or(&self.runtime_dir)
    }
}

fn value(key: &'static str, reason: impl ToString) -> ConfigError {
    ConfigError::Value { key, reason: reason.to_string() }
}

/// As what a session asks for: who may have less than a chunk has nothing.
fn limit(key: &'static str, text: &str) -> Result<Bytes, ConfigError> {
    size(key, text).and_then(|bytes| locate::as_limit(bytes).map_err(|error| value(key, error)))
}

fn size(key: &'static str, text: &str) -> Result<Bytes, ConfigError> {
    let bytes: Bytes = text.parse().map_err(|error| value(key, error))?;
    if bytes.is_zero() { Err(value(key, "0 bytes are too few")) } else { Ok(bytes) }
}

/// The UID of a pod. A name would be nobody's, and whoever was meant would have none of the terms that are written beside it.
fn pod(key: &'static str, text: &str) -> Result<String, ConfigError> {
    let uid = text.trim().to_ascii_lowercase();
    if !is_pod_uid(&uid) {
        let reason = format!(
            "'{text}' is no UID of a pod, such as 0a1b2c3d-1111-2222-3333-444455556666; `kubectl get pod NAME -o jsonpath='{{.metadata.uid}}'` says it of one by its name"
        );
        return Err(value(key, reason));
    }
    Ok(uid)
}

/// The size of a pretended device: a chunk at least, and no more than a device can have.
fn device_size(key: &'static str, text: &str) -> Result<Bytes, ConfigError> {
    let (min, max) = (limits::CHUNK_LEN_MIN, limits::ACQUIRE_BYTES_MAX);
    let bytes = size(key, text)?;
    if bytes < min {
        return Err(value(key, format!("{bytes} are less than one chunk, {min}")));
    }
    if bytes > max {
        return Err(value(key, format!("{bytes} are more than any device has, {max} at most")));
    }
    Ok(bytes)
}

/// `ORDINAL` or `UUID`, with `=BYTES` or without.
fn parse_device(text: &str) -> Result<DeviceConfig, ConfigError> {
    let (which, bytes) = text.split_once('=').map_or((text, None), |(which, bytes)| (which, Some(bytes)));
    let expected =
        || value("device", format!("'{text}' is not ORDINAL, UUID, ORDINAL=BYTES or UUID=BYTES, such as 0=80GiB"));
    let by_ordinal = which.trim().parse().ok().filter(|ordinal| *ordinal < limits::ORDINALS_MAX).map(Which::Ordinal);
    let by_uuid = || DeviceUuid::parse(which.trim()).map(Which::Uuid);
    let which = by_ordinal.or_else(by_uuid).ok_or_else(expected)?;
    Ok(DeviceConfig { which, bytes: bytes.map(|text| device_size("device", text)).transpose()? })
}

fn parse_address(text: &str) -> Result<SocketAddr, ConfigError> {
    text.parse().map_err(|_| value("http", format!("'{text}' is not an address with a port, such as 127.0.0.1:9464")))
}

fn parse_duration(key: &'static str, text: &str) -> Result<Duration, ConfigError> {
    parse_time(text).map_err(|error| value(key, error))
}

fn parse_deadline(key: &'static str, text: &str) -> Result<Duration, ConfigError> {
    let time = parse_duration(key, text)?;
    if time.is_zero() { Err(value(key, "no call ends in no time")) } else { Ok(time) }
}

/// A group by number, or by its name in the machine's list.
fn parse_group(text: &str) -> Result<u32, ConfigError> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let of_line = |line: &str| {
        let mut fields = line.split(':');
        (fields.next() == Some(text)).then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    let found = groups.lines().find_map(of_line);
    found.ok_or_else(|| value("socket_group", format!("there is no group '{text}' in /etc/group; a number works, too")))
}

fn parse_mode(text: &str) -> Result<u32, ConfigError> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| value("socket_mode", format!("'{text}' is not a mode such as 660")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(devices: &[&str]) -> Flags {
        Flags { devices: devices.iter().map(|text| (*text).to_owned()).collect(), ..Flags::default() }
    }

    fn load(text: &str, flags: &Flags) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stitchd.toml");
        std::fs::write(&path, text).unwrap();
        Config::load(Some(&path), flags)
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_the_defaults() {
        let config =
            load("runtime_dir = '/a'\nhttp = '127.0.0.1:1'\ndrain = '5s'\n", &flags(&["1=2GiB", "0"])).unwrap();
        assert_eq!((config.runtime_dir.as_path(), config.drain), (Path::new("/a"), Duration::from_secs(5)));
        assert_eq!(config.pretended_totals(), [PRETENDED_DEVICE, Bytes::gib(2)]);
        let flags = Flags { runtime_dir: Some("/b".into()), ..Flags::default() };
        assert_eq!(load("runtime_dir = '/a'", &flags).unwrap().runtime_dir, Path::new("/b"));
        // Whoever comes later begins elsewhere.
        let config = load("runtime_dir = 'a'\nstate_dir = 's'\nplans = 'p'", &Flags::default()).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!((config.runtime_dir, config.state_dir), (here.join("a"), Some(here.join("s"))));
        assert_eq!(config.plans, Some(here.join("p")));
    }

    #[test]
    fn the_effective_configuration_reads_back_as_itself() {
        let config = load(
            "ladder = ['2MiB', '64MiB']\nsession_limit = '3GiB'\nwarm = '1GiB'\nsocket_mode = '600'\n",
            &flags(&["0=1GiB"]),
        )
        .unwrap();
        assert_eq!(load(&config.to_toml(), &Flags::default()).unwrap(), config);
        let text = "wait = '7s'\nborrowed = 'end'\nadmins = [7]\n[[tenant]]\nname = 'a'\nuids = [1, 2]\npods = ['0A1B2C3D-1111-2222-3333-444455556666']\nlimit = '2GiB'\nguarantee = '1GiB'\nguarantee_max = '2GiB'\nlend = false\npriority = 3\n[[tenant]]\nname = 'b'\n";
        let config = load(text, &Flags::default()).unwrap();
        assert_eq!((config.wait, config.borrowed), (Duration::from_secs(7), Overstay::End));
        let (uids, pods) = (vec![1, 2], vec!["0a1b2c3d-1111-2222-3333-444455556666".to_owned()]);
        let (limit, guarantee) = (Some(Bytes::gib(2)), Bytes::gib(1));
        let guarantee_max = Bytes::gib(2);
        let tenant =
            TenantConfig { name: "a".into(), uids, pods, limit, guarantee, guarantee_max, lends: false, priority: 3 };
        assert_eq!(config.tenants[0], tenant);
        assert_eq!(load(&config.to_toml(), &Flags::default()).unwrap(), config);
    }

    #[test]
    fn devices_are_named_by_ordinal_or_uuid_and_each_once() {
        let device = |ordinal: u32, uuid: u8| DeviceDescription {
            id: crate::ids::DeviceId(ordinal),
            uuid: DeviceUuid([uuid; 16]),
            model: String::new(),
            total: Bytes::gib(8),
        };
        // With a gap: a device does not answer.
        let there = [device(0, 1), device(2, 3)];
        let chosen = |names: &[&str]| -> Result<Vec<(u32, Option<Bytes>)>, String> {
            let config = load("", &flags(names)).unwrap();
            assert_eq!(load(&config.to_toml(), &Flags::default()).unwrap(), config);
            let chosen = config.choose(&there).map_err(|which| which.to_string())?;
            Ok(chosen.into_iter().map(|(device, bytes)| (device.id.0, bytes)).collect())
        };
        let uuid = |byte: u8| DeviceUuid([byte; 16]).to_string();
        assert_eq!(chosen(&[]).unwrap(), [(0, None), (2, None)]);
        assert_eq!(chosen(&[&format!("{}=2GiB", uuid(3)), "0"]).unwrap(), [(2, Some(Bytes::gib(2))), (0, None)]);
        assert_eq!(chosen(&[&uuid(2)]).unwrap_err(), uuid(2));
        assert_eq!(chosen(&["1"]).unwrap_err(), "1");
        assert_eq!(chosen(&["2", &uuid(3)]).unwrap_err(), uuid(3), "it is the same");
    }

    #[test]
    fn a_ladder_is_a_list_or_is_to_be_measured() {
        let listed = load("ladder = ['2MiB', '64MiB']", &Flags::default()).unwrap();
        assert_eq!((listed.ladder.steps(), listed.ladder_is), (&[Bytes::mib(2), Bytes::mib(64)][..], LadderIs::Listed));
        let measured = load("ladder = 'measured'", &Flags::default()).unwrap();
        assert_eq!((&measured.ladder, measured.ladder_is), (&Ladder::standard(), LadderIs::Measured));
        // It stays an order: the next start measures anew.
        assert!(measured.to_toml().contains("ladder = \"measured\""), "{}", measured.to_toml());
        assert_eq!(load(&measured.to_toml(), &Flags::default()).unwrap(), measured);
        // What the selftest prints is what the file takes.
        let ladder = Ladder::new(vec![Bytes::mib(2), Bytes::mib(16), Bytes::gib(1)]).unwrap();
        let pasted = load(&format!("ladder = {}", ladder.to_toml()), &Flags::default()).unwrap();
        assert_eq!(pasted.ladder, ladder);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("driver = 'cudda'", "driver: there is no driver 'cudda'"),
            ("http = 'here'", "http: 'here' is not an address"),
            ("warm = 'hot'", "warm: 'hot'"),
            ("session_limit = '1'", "session_limit: 1 B are less than one chunk, 2.0 MiB"),
            ("runtime_dir = ''", "runtime_dir: "),
            ("plans = \"a\\u0000b\"", "plans: a path has no byte 0"),
            ("drain = '5'", "drain: '5' is not a time"),
            ("drain = '18446744073709551615s'", "drain: '18446744073709551615s' is not a time"),
            ("[[device]]\nordinal = 4294967295", "device.ordinal: 4294967295 is above any machine's"),
            ("[[device]]\nbytes = '1GiB'", "device: each has an ordinal or a uuid"),
            ("[[device]]\nordinal = 0\nuuid = 'GPU-1'", "device: each has an ordinal or a uuid"),
            ("[[device]]\nuuid = 'GPU-1'", "device.uuid: 'GPU-1' is no UUID"),
            ("socket_mode = '999'", "socket_mode"),
            ("borrowed = 'never'", "borrowed: it is one of refuse, wait and end"),
            ("[[tenant]]\nname = ''", "tenant.name: '' is no name"),
            ("[[tenant]]\nname = 'uid:0'", "tenant.name: 'uid:0' is no name"),
            ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", "tenant.name: 'a' is there twice"),
            ("[[tenant]]\nname = 'a'\nlimit = '1GiB'\nguarantee = '2GiB'", "tenant.guarantee: 2.00 GiB of 'a'"),
            (
                "[[tenant]]\nname = 'a'\nguarantee = '2GiB'\nguarantee_max = '1GiB'",
                "tenant.guarantee_max: 1.00 GiB of 'a' are less",
            ),
            ("[[tenant]]\nname = 'a'\npods = ['web-0']", "tenant.pods: 'web-0' is no UID of a pod, such as"),
            ("[[tenant]]\nname = 'a'\npods = ['']", "tenant.pods: '' is no UID of a pod"),
            ("guarantee_max = 'all'", "guarantee_max: 'all' is not a size"),
            ("driver_deadline = '0s'", "driver_deadline: no call"),
            ("ladder = []", "ladder"),
            ("ladder = ['3MiB']", "ladder"),
            ("ladder = 'guessed'", "ladder: 'guessed' is neither"),
            ("[[device]]\nordinal = 0\nbytes = '0'", "device.bytes: 0 bytes"),
            ("[[device]]\nordinal = 0\n[[device]]\nordinal = 0", "device: device 0 is there twice"),
        ];
        for (text, expected) in cases {
            let error = load(text, &Flags::default()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text} gives {error}");
        }
        assert!(load("colour = 1", &Flags::default()).unwrap_err().to_string().contains("unknown field"));
        assert!(load("[tenant]\nname = 'a'", &Flags::default()).unwrap_err().to_string().contains("[[tenant]]"));
        assert!(load("ladder = 3", &Flags::default()).unwrap_err().to_string().contains("ladder is a list of sizes"));
        for text in ["x", "0=", "0=x", "-1", "9999", "0=1", "0=1MiB", "0=99999TiB"] {
            assert!(load("", &flags(&[text])).is_err(), "{text}");
        }
    }
}
