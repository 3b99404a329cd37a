//! The Python package, and `stitchd run`: its own tests in processes of Python, and whole commands over a package that stands for PyTorch.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use stitchd::driver::gpu::GpuKind;

use crate::standin::Machine;
use crate::support::{TestDaemon, client_library_for, stitchd, variable};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The interpreter: one with PyTorch, if whoever runs the tests names it.
fn interpreter() -> PathBuf {
    variable("STITCHD_TEST_PYTHON").map_or_else(|| "python3".into(), PathBuf::from)
}

fn on_gpus() -> TestDaemon {
    TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 1073741824"), &[])
}

/// The library with test hooks, or why not.
fn library() -> Option<PathBuf> {
    let library = client_library_for(true);
    if library.is_none() {
        println!("SKIP: no libstitchd_client.so with test hooks was built; build the whole workspace with its tests");
    }
    library
}

/// Runs one file of the package's tests.
fn list(file: &str, daemon: &TestDaemon, driver: &str, library: &Path) -> Option<Output> {
    list_over(file, daemon, driver, library, None)
}

/// The same over what stands for CUDA's runtime.
fn list_over(file: &str, daemon: &TestDaemon, driver: &str, library: &Path, runtime: Option<&Path>) -> Option<Output> {
    let mut command = Command::new(interpreter());
    command
        .args(["-m", "unittest", "-v", &format!("tests.cpu.{file}")])
        .current_dir(Path::new(ROOT).join("client/python"))
        .envs(daemon.environment())
        .env("STITCHD_LIBRARY", library)
        .env("STITCHD_TEST_DRIVER", driver);
    if let Some(runtime) = runtime {
        command.env("STITCHD_TEST_RUNTIME", runtime).env("STITCHD_TEST_BINARY", env!("CARGO_BIN_EXE_stitchd"));
    }
    match command.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) => {
            println!("SKIP: {} cannot be started: {error}", interpreter().display());
            None
        }
    }
}

fn passes(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for skipped in said.lines().filter(|line| line.contains("... skipped")) {
        println!("SKIP: {skipped}");
    }
}

#[test]
fn the_package_by_itself_and_its_library_do_what_they_say() {
    let Some(library) = library() else { return };
    let daemon = TestDaemon::start(64);
    for file in ["test_package", "test_library", "test_sleep"] {
        let Some(output) = list(file, &daemon, crate::support::driver_name(), &library) else { return };
        passes(&output);
    }
}

#[test]
fn modules_are_shared_between_processes_of_a_real_pytorch() {
    let Some(library) = library() else { return };
    let daemon = TestDaemon::start(64);
    let Some(output) = list("test_share", &daemon, crate::support::driver_name(), &library) else { return };
    passes(&output);
    daemon.wait_for_device("leased_bytes", 0);
}

#[test]
fn with_a_real_pytorch_the_package_does_what_it_says() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    for file in ["test_with_torch", "test_graph"] {
        let Some(output) = list(file, &daemon, "cuda", &library) else { return };
        passes(&output);
    }
}

/// What stands for CUDA's runtime under a real PyTorch, built against the headers that come with that; or why not.
fn cuda_runtime(daemon: &TestDaemon) -> Option<PathBuf> {
    let skip = |why: &str| -> Option<PathBuf> {
        println!("SKIP: no PyTorch on a pretended device: {why}");
        None
    };
    let where_from = "import importlib.util as u, pathlib as p
torch, cuda = u.find_spec('torch'), u.find_spec('nvidia.cu13') if u.find_spec('nvidia') else None
print(p.Path(list(cuda.submodule_search_locations)[0]) / 'include' if torch and cuda else '')";
    let Ok(said) = Command::new(interpreter()).args(["-c", where_from]).output() else { return skip("no Python") };
    let headers = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    if !headers.join("cuda_runtime_api.h").is_file() {
        return skip("STITCHD_TEST_PYTHON names no Python with a PyTorch for CUDA 13");
    }
    let machine = daemon.machine().library().parent().unwrap();
    let source = Path::new(ROOT).join("tests/standin-driver/runtime");
    // Under the driver's name, as PyTorch asks for that one, too.
    let built = machine.join("libcuda.so.1");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1", "-lpthread"]);
    // The machine's own driver, before whatever lies where libraries are looked for.
    compiler.arg("-Wl,--disable-new-dtags");
    compiler.arg("-I").arg(source.join("include")).arg("-I").arg(&headers).arg(source.join("runtime.c"));
    compiler.arg("-L").arg(machine).arg(format!("-Wl,-rpath,{}", machine.display())).arg("-lstandin_cuda");
    let Ok(output) = compiler.arg("-o").arg(&built).output() else { return skip("there is no compiler called cc") };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(built)
}

#[test]
fn a_real_pytorch_on_a_pretended_device_has_what_its_users_rely_on() {
    let Some(library) = library() else { return };
    let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 1073741824"), &["--device=0=512MiB"]);
    let Some(runtime) = cuda_runtime(&daemon) else { return };
    for file in ["test_on_device", "test_frameworks"] {
        let Some(output) = list_over(file, &daemon, "cuda", &library, Some(&runtime)) else { return };
        passes(&output);
    }
    assert_eq!(daemon.device("leased_bytes"), 0);
}

#[test]
fn a_step_of_a_real_pytorch_runs_in_its_order_from_its_plan_without_a_deviation() {
    let Some(library) = library() else { return };
    let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 1073741824"), &["--device=0=512MiB"]);
    let Some(runtime) = cuda_runtime(&daemon) else { return };
    let Some(output) = list_over("test_graph_on_device", &daemon, "cuda", &library, Some(&runtime)) else { return };
    passes(&output);
    assert_eq!(daemon.device("leased_bytes"), 0);
}

/// A GPT of this many layers, trained by a real PyTorch on a pretended device; behind its fourth step peaks are counted anew, and at its end it says what they are.
fn gpt(layers: u32) -> String {
    format!(
        "import runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
def stepped(*_):
    steps.append(max([torch.cuda.max_memory_reserved(), *steps[-1:]]))
    if len(steps) == 4: torch.cuda.reset_peak_memory_stats()
register_optimizer_step_post_hook(stepped)
sys.argv = 'train_gpt.py --steps 7 --layers {layers} --evaluate-every 0'.split()
runpy.run_path('{ROOT}/client/python/examples/train_gpt.py', run_name='__main__')
print('FIGURES', steps[-1], torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()['requested_bytes.all.peak'])"
    )
}

/// What it says: bytes reserved at most, the same from the fifth step on, and what was live then.
fn figures(output: &Output) -> [u64; 3] {
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let line = said.lines().find_map(|line| line.strip_prefix("FIGURES ")).unwrap_or_else(|| panic!("{output:?}"));
    let numbers: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
    numbers.try_into().unwrap()
}

#[test]
fn a_real_training_run_takes_less_than_with_pytorchs_allocator_whose_figure_is_told_to_the_byte() {
    let Some(library) = library() else { return };
    let daemon = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 34359738368"), &[]);
    let Some(runtime) = cuda_runtime(&daemon) else { return };
    let (python, job) = (interpreter().display().to_string(), gpt(6));
    let own = |conf: &str| {
        let mut alone = Command::new(&python);
        alone.args(["-c", &job]).envs(daemon.environment()).env("LD_PRELOAD", &runtime).env_remove("STITCHD_TORCH");
        alone.env("PYTORCH_CUDA_ALLOC_CONF", conf).stdin(Stdio::null()).output().unwrap()
    };
    let under = |plan: &[&str]| {
        let mut under = stitchd();
        under.args([&["run", "--json"], plan, &["--", &python, "-c", &job]].concat()).envs(daemon.environment());
        under.env("STITCHD_LIBRARY", &library).env("LD_PRELOAD", &runtime).stdin(Stdio::null()).output().unwrap()
    };
    let (caching, expandable) = (figures(&own("")), figures(&own("expandable_segments:True")));
    let (bare, auto, again) = (under(&["--plan", "none"]), under(&[]), under(&[]));
    println!("{:<28}{:>16}{:>16}{:>20}", "a GPT of 6 layers", "reserved", "from step 5", "live of that");
    let rows = [
        ("PyTorch", caching),
        ("expandable segments", expandable),
        ("stitchd run --plan none", figures(&bare)),
        ("stitchd run", figures(&auto)),
        ("the next such run", figures(&again)),
    ];
    for (name, [reserved, steady, live]) in rows {
        let share = 100.0 * live as f64 / steady as f64;
        println!("{name:<28}{:>12} MiB{:>12} MiB{share:>18.2} %", reserved >> 20, steady >> 20);
    }
    for (name, [reserved, steady, _]) in &rows[2..] {
        let least = caching[0].min(expandable[0]);
        assert!(*reserved < least && *steady < least, "{name}: {reserved} and {steady}, {least} with PyTorch's own");
    }
    let said: Value = serde_json::from_slice(&auto.stdout).unwrap_or_else(|_| panic!("{auto:?}"));
    let device = &said["processes"][0]["devices"][0];
    // The model of it, replaying what was recorded here, against the real one on the same job.
    assert_eq!(device["pytorch_reserved_bytes"].as_u64(), Some(caching[0]), "{said}");
    assert_eq!(said["processes"][0]["iterations"].as_u64(), Some(6), "{said}");
}

/// `stitchd run` of a job over what stands for PyTorch.
fn run(daemon: &TestDaemon, library: &Path, flags: &[&str], command: &[&str]) -> Output {
    let mut ran = stitchd();
    ran.arg("run").args(flags).arg("--").args(command).envs(daemon.environment()).env("STITCHD_LIBRARY", library);
    ran.env("PYTHONPATH", Path::new(ROOT).join("tests/e2e/torch_like"));
    ran.current_dir(daemon.path()).stdin(Stdio::null()).output().unwrap()
}

fn job() -> String {
    Path::new(ROOT).join("tests/e2e/torch_like/job.py").display().to_string()
}

#[test]
fn a_program_that_knows_nothing_of_it_is_served_by_the_daemon_and_summed_up() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--plan", "auto", "--json"], &[&python, &job, "12", "0.2"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    // What the program said is with what is for people.
    assert!(errors.contains("served True"), "{errors}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let process = &said["processes"][0];
    assert_eq!((said["exit_code"].as_u64(), process["is_over"].as_bool()), (Some(0), Some(true)), "{said}");
    assert_eq!(process["iterations"].as_u64(), Some(11), "{said}");
    let device = &process["devices"][0];
    let bytes = |name: &str| device[name].as_u64().unwrap_or_else(|| panic!("{name}: {said}"));
    // 8 MiB of weights, 9 and 15 MiB kept with 512 bytes each, and 5 MiB of the second layer's scratch beside them.
    assert_eq!(bytes("peak_allocated_bytes"), (37 << 20) + 1024);
    assert!(bytes("peak_reserved_bytes") >= 37 << 20 && bytes("pytorch_reserved_bytes") >= 37 << 20, "{said}");
    assert_eq!((bytes("requests"), device["pytorch_is_of_beginning"].as_bool()), (1 + 12 * 4, Some(false)), "{said}");
    assert_eq!(device["counters"]["plans_installed"].as_u64(), Some(1), "{said}");
    assert_eq!(daemon.device("leased_bytes"), 0);
}

#[test]
fn people_see_what_happens_and_a_table_at_the_end() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--record", "run.stitchtrace"], &[&python, &job, "4"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served True\n", "{errors}");
    assert!(errors.contains("device 0 is served by stitchd"), "{errors}");
    let table: Vec<&str> = errors.lines().skip_while(|line| !line.starts_with("process")).collect();
    assert!(
        table.len() >= 2 && table[0].contains("PyTorch would reserve") && table[1].contains("37.0 MiB"),
        "{errors}"
    );
    // The recording is one that plans are made of, with phases and modules.
    let recorded = std::fs::read_dir(daemon.path()).unwrap().flatten().map(|entry| entry.path());
    let recorded =
        recorded.filter(|path| path.extension().is_some_and(|ending| ending == "stitchtrace")).collect::<Vec<_>>();
    assert_eq!(recorded.len(), 1, "{recorded:?}");
    let info = crate::support::run_json(&["trace", "info", recorded[0].to_str().unwrap(), "--layers", "--json"]);
    let layers: Vec<&str> =
        info["layers"].as_array().unwrap().iter().filter_map(|layer| layer["name"].as_str()).collect();
    assert!(layers.contains(&"layers.0") && layers.contains(&"layers.1"), "{info}");
    assert_eq!(info["iterations"].as_u64(), Some(4), "{info}");
}

#[test]
fn exit_codes_and_signals_are_the_commands_own() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let code = |command: &[&str]| run(&daemon, &library, &["--quiet"], command).status.code();
    assert_eq!(code(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(code(&["sh", "-c", "kill -9 $$"]), Some(137));
    let output = run(&daemon, &library, &[], &["true"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && errors.starts_with("stitchd: no figures: no process of it has used a GPU"),
        "{errors}"
    );
    let output = run(&daemon, &library, &[], &["/nowhere/python", "train.py"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("/nowhere/python"), "{errors}");
}

#[test]
fn without_a_daemon_or_with_a_wrong_plan_one_line_says_what_happens() {
    let Some(library) = library() else { return };
    let mut daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--plan", &job], &[&python, &job, "2"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = run(&daemon, &library, &["--record", "/nowhere/run.stitchtrace"], &[&python, &job, "2"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{output:?}");
    daemon.terminate();
    let output = run(&daemon, &library, &[], &[&python, &job, "2"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "own allocator False\n", "{errors}");
    assert!(output.status.success() && errors.contains("the program keeps PyTorch's own allocator"), "{errors}");
    let output = run(&daemon, &library, &["--without-daemon", "stop"], &[&python, &job, "2"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0), "{output:?}");
    let output = run(&daemon, &library, &["--without-daemon", "private"], &[&python, &job, "2"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served True\n", "{errors}");
}

#[test]
fn what_goes_wrong_beside_the_job_does_not_go_wrong_in_it() {
    let Some(library) = library() else { return };
    let daemon = on_gpus();
    let (python, job) = (interpreter().display().to_string(), job());
    let output = run(&daemon, &library, &["--record", "run.stitchtrace", "--no-compare"], &[&python, &job, "3"]);
    assert!(output.status.success(), "{output:?}");
    let mut recorded = std::fs::read_dir(daemon.path()).unwrap().flatten().map(|entry| entry.path());
    let recorded = recorded.find(|path| path.extension().is_some_and(|ending| ending == "stitchtrace")).unwrap();
    let plan = daemon.path().join("job.plan").display().to_string();
    assert!(crate::support::run(&["plan", recorded.to_str().unwrap(), "-o", &plan]).status.success());
    let small = TestDaemon::on(Machine::new(GpuKind::Cuda, "devices = 1073741824"), &["--device=0=38MiB"]);
    let holder = small.runtime("holder");
    let held = holder.alloc(&stitchd::pool::Request::of(stitchd::units::Bytes::mib(2))).unwrap();
    // The plan's pool cannot be had, and the job is served without it as far as memory goes.
    let script =
        "import torch; torch.cuda.init(); s = torch.cuda.Storage(1 << 20); print('served' if s.address else 'not')";
    let output = run(&small, &library, &["--plan", &plan], &[&python, "-c", script]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served\n", "{output:?}");
    holder.free(held, stitchd::ids::StreamId::DEFAULT).unwrap();
    // The command's code is its own where nobody can hear what there is to say, and processes that outlive it are served.
    let mut deaf = stitchd();
    deaf.args(["run", "--", "sh", "-c", "exit 3"]).envs(daemon.environment());
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(deaf.stderr(full).stdin(Stdio::null()).status().unwrap().code(), Some(3));
    let said = daemon.path().join("said").display().to_string();
    let outlives = format!("(sleep 1; {python} {job} 1 > {said}.new; mv {said}.new {said}) > /dev/null 2>&1 &");
    assert!(run(&daemon, &library, &[], &["sh", "-c", &outlives]).status.success());
    let heard = crate::support::eventually("the process that was left behind", || std::fs::read_to_string(&said).ok());
    assert_eq!(heard, "served True\n");
}
