//! Long work beside the job: in a thread of its own, with the lowest priority that still gets on where
//! every core is busy.

use std::thread::Builder;

/// Of -20 to 19.
const LOWEST: i32 = 19;

/// Does some work so, and waits for it. Where no thread can be had it is done here.
pub(super) fn aside(work: &mut (dyn FnMut() + Send)) {
    let mut is_done = false;
    std::thread::scope(|scope| {
        let begun = Builder::new().name("stitchd-plan".into()).spawn_scoped(scope, || {
            // On Linux the priority is that of the thread, and of those that it begins. Without it the work is
            // done, too.
            let _ = rustix::process::setpriority_process(None, LOWEST);
            work();
            is_done = true;
        });
        drop(begun);
    });
    if !is_done {
        work();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_aside_and_what_it_begins_have_the_lowest_priority_and_who_waits_has_its_own() {
        let priority = || rustix::process::getpriority_process(None).unwrap();
        let (own, mut seen) = (priority(), Vec::new());
        aside(&mut || seen.extend([priority(), std::thread::spawn(priority).join().unwrap()]));
        assert_eq!((seen, priority()), (vec![LOWEST, LOWEST], own));
    }
}
