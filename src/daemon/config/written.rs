//! A configuration as people read it: each key with what it is for, and those that nothing is said of as comments.

/// The keys beside tables, in the order in which they are written: what each is for, and what it may be where nothing is said.
const KEYS: [(&str, &str, &str); 21] = [
    ("driver", "Which driver (--help names them); with host memory of this machine pretends to be devices.", ""),
    ("runtime_dir", "Where the two sockets and the lock are: clients find them here.", ""),
    (
        "state_dir",
        "Where the journal and the keeper's socket are, else with the sockets. No client's container may have it.",
        "\"/run/stitchd-state\"",
    ),
    ("http", "Where the live page, /metrics, /livez and /readyz are; nowhere else.", "\"127.0.0.1:9464\""),
    ("ladder", "Sizes of chunks, such as [\"2MiB\", \"32MiB\", \"256MiB\"], or \"auto\" or \"measured\".", ""),
    ("session_limit", "Bytes that a session may hold that does not say; else all there are.", "\"40GiB\""),
    (
        "guarantee_max",
        "Bytes of a device that a session of no tenant may ask to be guaranteed; else all without tenants, none with.",
        "\"20GiB\"",
    ),
    ("warm", "Bytes per device that are created ahead of need.", ""),
    ("priority_max", "The highest priority that a session may ask for.", ""),
    ("drain", "Without a keeper: how long sessions may go on once the daemon is to end.", ""),
    ("driver_deadline", "A driver call that takes longer has failed.", ""),
    ("socket_mode", "Access to the sockets: who may connect may lease memory.", ""),
    ("socket_group", "The group of the sockets and their directory; else the daemon's own.", "\"stitchd\""),
    ("plans", "Where plans are stored, else in runtime_dir.", "\"/var/lib/stitchd/plans\""),
    ("plans_max", "Bytes that all stored plans may have: in memory, where they are in a runtime directory.", ""),
    ("wait", "How long a session that grows waits for others before it is out of memory.", ""),
    ("linger_max", "How long a shared range may outlive its last holder.", ""),
    ("keeper", "Who holds what outlives the daemon: process, systemd or none.", ""),
    ("keeper_linger", "How long a keeper stays while there is no daemon and no process that had a session.", ""),
    (
        "borrowed",
        "When what is guaranteed is lent and does not come back in time: refuse, wait, or end who has it.",
        "",
    ),
    ("admins", "Users that may limit, trim, evict and drain, beside root and the daemon's own.", ""),
];

const DEVICES: &str = "\
# Which devices, by ordinal or UUID; without any all that the driver shows.
# [[device]]
# uuid = \"GPU-8932f937-d72c-4106-c12f-20bd9faed9f6\"
# bytes = \"60GiB\"                 # the most that is taken of it
";

const TENANTS: &str = "\
# Whose sessions have which terms.
# [[tenant]]
# name = \"inference\"
# uids = [1001]                   # or pods = [\"…\"], by UID; with neither whoever says that he is
# limit = \"40GiB\"                 # for each session, all devices together
# guarantee = \"20GiB\"             # of a device, for each session
# guarantee_max = \"30GiB\"         # the most that one may ask for
# lend = true                     # what is not used is others' meanwhile
# priority = 1
";

/// `toml`, as it is serialised, with that.
pub(super) fn annotated(toml: &str) -> String {
    let tables_at = if toml.starts_with('[') { 0 } else { toml.find("\n[").map_or(toml.len(), |at| at + 1) };
    let (keys, tables) = toml.split_at(tables_at);
    let mut text = String::from(
        "# What a daemon is told; deploy/README.md says more of each. Lines that begin with # say nothing.\n",
    );
    for (key, what, example) in KEYS {
        text.push_str(&format!("\n# {what}\n"));
        match keys.lines().find(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(" = "))) {
            Some(line) => text.push_str(&format!("{line}\n")),
            None => text.push_str(&format!("# {key} = {example}\n")),
        }
    }
    for (name, example) in [("[[device]]", DEVICES), ("[[tenant]]", TENANTS)] {
        if !tables.contains(name) {
            text.push_str(&format!("\n{example}"));
        }
    }
    if !tables.is_empty() {
        text.push_str(&format!("\n{tables}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::{Config, Flags};

    #[test]
    fn every_key_is_there_and_its_example_is_one() {
        let config = Config::load(None, &Flags::default()).unwrap();
        let text = config.to_toml();
        // What is said by the comments can be said.
        let said: Vec<&str> = text.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)).collect();
        let (mut loud, mut is_value) = (String::new(), false);
        for line in said {
            is_value = line.contains(" = ") && !line.contains("such as") || line.starts_with("[[");
            if is_value {
                loud.push_str(&format!("{line}\n"));
            }
        }
        assert!(is_value, "the last line is a key of a tenant");
        let file: toml::Table = loud.parse().unwrap_or_else(|error| panic!("{error}\n{loud}"));
        let keys: Vec<&str> = KEYS.iter().map(|(key, ..)| *key).collect();
        assert_eq!(
            file.keys()
                .filter(|key| file[*key].as_array().is_none_or(|all| !all.iter().any(toml::Value::is_table)))
                .count(),
            keys.len()
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stitchd.toml");
        // There may be no such group here.
        std::fs::write(&path, loud.replace("socket_group = \"stitchd\"", "socket_group = \"0\"")).unwrap();
        let all = Config::load(Some(&path), &Flags::default()).unwrap();
        assert_eq!((all.devices.len(), all.tenants.len()), (1, 1));
        // Nothing is left out, and nothing is said that is not there.
        let written: toml::Table = all.to_toml().parse().unwrap();
        assert_eq!(
            written.keys().filter(|key| !keys.contains(&key.as_str())).collect::<Vec<_>>(),
            ["device", "tenant"]
        );
    }
}
