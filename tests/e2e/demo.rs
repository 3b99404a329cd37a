//! The demo, whole.

use crate::support::{run, stderr};

#[test]
fn the_demo_checks_every_byte_and_gets_all_of_them_back() {
    let output = run(&["demo", "--repeat", "8", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let processes = result["processes"].as_array().unwrap();
    assert!(processes.len() >= 4);
    assert_eq!(processes.iter().filter(|process| process["killed"] == true).count(), 1);
    assert_eq!(result["lost_bytes"], 0);
    assert!(result["bytes_returned_after_kill"].as_u64().unwrap() > 1 << 30);
    assert!(result["peak_leased_bytes"].as_u64() <= result["device_budget_bytes"].as_u64());
    assert!(result["resident_bytes"].as_u64().unwrap() < 4 << 30);
    for process in processes.iter().filter(|process| process["killed"] == false) {
        assert!(process["patterns_checked"].as_u64() > process["allocations"].as_u64(), "{process}");
        assert!(process["served"]["planned"].as_u64().unwrap() > 0, "{process}");
        assert!(process["peak_live_bytes"].as_u64().unwrap() > 10 << 30, "{process}");
        // A regular job settles: the last iteration makes no driver call.
        assert_eq!(process["driver_calls_last_iteration"], 0, "{process}");
    }
}
