//! What people write on a command line or into a file: sizes, times, devices, uuids, names of plans and drivers.

use stitchd::daemon::config::{Config, Flags, Which};
use stitchd::driver::DriverName;
use stitchd::driver::cost_table::CostTable;
use stitchd::ids::{DeviceUuid, PlanId};
use stitchd::limits;
use stitchd::units::Bytes;

pub(crate) fn read(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(size) = text.parse::<Bytes>() {
        assert!(size <= Bytes::new(1 << 62));
        assert_eq!(size.get().to_string().parse(), Ok(size));
    }
    if let Some(uuid) = DeviceUuid::parse(&text) {
        assert!(uuid.to_string().eq_ignore_ascii_case(&text), "{text:?} is taken for {uuid}");
    }
    if let Some(plan) = PlanId::from_hex(&text) {
        assert_eq!(plan.to_hex(), text);
    }
    if let Ok(driver) = text.parse::<DriverName>() {
        assert!(DriverName::ALL.contains(&(&text, driver)));
    }
    assert!(CostTable::named(&text).is_none_or(|table| table.name == text));
    let device = Flags { devices: vec![text.clone().into_owned()], ..Flags::default() };
    if let Ok(config) = Config::load(None, &device) {
        let [device] = config.devices[..] else { panic!("one flag is one device") };
        assert!(device.bytes.is_none_or(|bytes| bytes >= limits::CHUNK_LEN_MIN && bytes <= limits::ACQUIRE_BYTES_MAX));
        let count = match device.which {
            Which::Ordinal(ordinal) => ordinal as usize + 1,
            Which::Uuid(_) => 1,
        };
        assert_eq!(config.pretended_totals().len(), count);
    }
    let http = Flags { http: Some(text.clone().into_owned()), ..Flags::default() };
    if let Ok(config) = Config::load(None, &http) {
        let written = config.http.expect("it was given").to_string();
        let again = Flags { http: Some(written), ..Flags::default() };
        assert_eq!(Config::load(None, &again).expect("an address that was written").http, config.http);
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "0",
        "80GiB",
        "1.5 MiB",
        "18446744073709551615",
        "4611686018427387904",
        "1e300",
        "-0",
        "0=80GiB",
        "1023=2MiB",
        "3",
        "GPU-73746974-6368-642d-686f-73742d303030",
        "GPU-73746974-6368-642D-686F-73742D303030",
        "GPU-+3+4+9+4+3+8+4+d+8+f+3+4+d+0+0+0",
        "GPU-737469746368642d686f73742d303030",
        "00000000000012ab",
        "+0000000000012ab",
        "00000000000012AB",
        "auto",
        "a100",
        "127.0.0.1:9464",
        "[::1]:80",
    ];
    texts.map(|text| text.as_bytes().to_vec()).into()
}
