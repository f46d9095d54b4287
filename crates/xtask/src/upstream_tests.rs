// SPDX-License-Identifier: Apache-2.0

//! Upstream's own tests on the pinned sources, with none, some or all patches of the series.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cache::{Cache, sha256};
use crate::command;
use crate::frontend;
use crate::interrupt;
use crate::own_crates;
use crate::patch;
use crate::progress::say;
use crate::upstream::{Pins, file_of, series_folder};
use crate::upstream_counts::{Counts, LeftOut, Listed, Names, Results, Row, Run, failed_names};

/// `utoipa-swagger-ui`, which dynamo-llm needs, downloads this at build time unless it is named.
const SWAGGER_UI_VARIABLE: &str = "SWAGGER_UI_DOWNLOAD_URL";
/// Where the tree keeps it.
const SWAGGER_UI_FILE: &str = "swagger-ui.zip";
/// Cargo adapts it to the paths; it is the package's, not the repository's.
const LOCK_FILE: &str = "Cargo.lock";

/// `tests.toml` of the series: which of upstream's tests run, and why the others do not.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// Files that the tests need and no pinned crate has.
    packed_file: Vec<PackedFile>,
    stand_in: Vec<StandIn>,
    /// The runs.
    pub(crate) run: Vec<PlannedRun>,
    /// What does not run.
    pub(crate) left_out: Vec<LeftOut>,
}

/// A file of another package.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PackedFile {
    /// Its path in the tree.
    path: PathBuf,
    #[serde(rename = "crate")]
    name: String,
    version: String,
    sha256: String,
    /// Its path in the package.
    file: String,
}

/// A file that is on no registry, and what stands in for it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StandIn {
    /// Its path in the tree.
    path: PathBuf,
    text: String,
}

/// Tests of one pinned crate.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlannedRun {
    /// The crate.
    #[serde(rename = "crate")]
    pub(crate) name: String,
    /// Tests that the unpatched sources have under these filters.
    pub(crate) upstream_tests: u64,
    /// Arguments of `cargo test`.
    #[serde(default)]
    arguments: Vec<String>,
    /// Only tests whose names contain one of these; all when empty.
    #[serde(default)]
    filters: Vec<String>,
    /// Tests left out of them.
    #[serde(default)]
    skip: Vec<Skip>,
}

/// A test, or part of its name, that cannot run here.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Skip {
    test: String,
    reason: String,
}

impl Plan {
    /// Reads `tests.toml`.
    pub(crate) fn read() -> Result<Self> {
        let path = series_folder().join("tests.toml");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
    }

    /// What does not run: whole parts, and tests out of a run.
    pub(crate) fn not_run(&self) -> Vec<LeftOut> {
        let skipped = self.run.iter().flat_map(|run| {
            run.skip.iter().map(|skip| LeftOut {
                name: run.name.clone(),
                tests: skip.test.clone(),
                reason: skip.reason.clone(),
            })
        });
        skipped.chain(self.left_out.iter().cloned()).collect()
    }

    fn write_files(&self, tree: &Path) -> Result<()> {
        let mut files = Vec::new();
        for packed in &self.packed_file {
            let contents = file_of(&packed.name, &packed.version, &packed.sha256, &packed.file)?;
            files.push((&packed.path, contents));
        }
        for stand_in in &self.stand_in {
            files.push((&stand_in.path, stand_in.text.clone().into_bytes()));
        }
        for (path, contents) in files {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().unwrap_or(tree))?;
            fs::write(&path, contents)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

impl PlannedRun {
    /// Behind `--`: filters and what is skipped.
    fn filter_arguments(&self) -> impl Iterator<Item = &str> {
        let skips = self
            .skip
            .iter()
            .flat_map(|skip| ["--skip", skip.test.as_str()]);
        self.filters.iter().map(String::as_str).chain(skips)
    }

    /// The command in Dynamo's repository.
    pub(crate) fn command(&self) -> String {
        let mut command = format!("cargo test -p {}", self.name);
        for argument in &self.arguments {
            command.push(' ');
            command.push_str(argument);
        }
        let behind: Vec<&str> = self.filter_arguments().collect();
        if !behind.is_empty() {
            command.push_str(" -- ");
            command.push_str(&behind.join(" "));
        }
        command
    }
}

/// The sources that upstream's tests run on. There is one for all states of the series, so that
/// cargo builds again only what differs between them; one command at a time uses it.
#[derive(Debug)]
struct Tree<'a> {
    cache: &'a Cache,
    pins: Pins,
    folder: PathBuf,
    _lock: File,
}

impl<'a> Tree<'a> {
    fn open(cache: &'a Cache) -> Result<Self> {
        let lock_path = cache.folder("locks")?.join("upstream-tests");
        let lock = File::create(&lock_path)
            .with_context(|| format!("cannot open {}", lock_path.display()))?;
        if lock.try_lock().is_err() {
            say("upstream's tests: waiting for another command that runs them");
            lock.lock()
                .with_context(|| format!("cannot lock {}", lock_path.display()))?;
        }
        let pins = Pins::read()?;
        let folder = cache.folder(&format!("upstream-tests/dynamo-{}", pins.version))?;
        Ok(Self {
            cache,
            pins,
            folder,
            _lock: lock,
        })
    }

    /// Makes the tree the sources with these patches.
    fn set(&self, plan: &Plan, patches: &[String]) -> Result<()> {
        let fresh = tempfile::tempdir()?;
        patch::prepare_with(self.cache, fresh.path(), patches)?;
        plan.write_files(fresh.path())?;
        synchronize(fresh.path(), &self.folder)?;
        // What this repository's crates bring along has the frontend's versions.
        let frontend = fs::read_to_string(frontend::lock_file())?;
        for pin in &self.pins.crates {
            let path = self.folder.join(&pin.path).join(LOCK_FILE);
            let lock = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let with = own_crates::with_versions(&lock, &frontend)?;
            if with != lock {
                fs::write(&path, with)
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
        Ok(())
    }

    fn cargo(&self, planned: &PlannedRun) -> Result<Command> {
        let pin = self
            .pins
            .crates
            .iter()
            .find(|pin| pin.name == planned.name)
            .with_context(|| format!("tests.toml: pins.toml has no crate {}", planned.name))?;
        let mut cargo = Command::new(env!("CARGO"));
        cargo.arg("test");
        frontend::patch_registry(&mut cargo, &self.pins, &self.folder)?;
        let swagger_ui = self.folder.join(SWAGGER_UI_FILE);
        cargo
            .args(&planned.arguments)
            .current_dir(self.folder.join(&pin.path))
            .env(
                "CARGO_TARGET_DIR",
                self.cache.folder("target/upstream-tests")?,
            )
            // The test program of dynamo-llm alone would take 2 GB, and its increments 3.
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env(
                SWAGGER_UI_VARIABLE,
                format!("file://{}", swagger_ui.display()),
            );
        frontend::build_environment(&mut cargo, self.cache)?;
        Ok(cargo)
    }

    fn list(&self, planned: &PlannedRun, only_ignored: bool) -> Result<Names> {
        let mut cargo = self.cargo(planned)?;
        cargo.args(["--quiet", "--", "--list"]);
        if only_ignored {
            cargo.arg("--ignored");
        }
        cargo.args(planned.filter_arguments());
        Ok(Names::parse(&command::output(cargo)?))
    }

    /// Builds and runs the tests. What is wrong with them stands in the answer; tests that do not
    /// build have no list.
    fn run(&self, planned: &PlannedRun) -> Result<(Run, Option<Listed>)> {
        let began = Instant::now();
        let mut run = Run {
            name: planned.name.clone(),
            command: planned.command(),
            counts: Counts::default(),
            listed: 0,
            problems: Vec::new(),
            seconds: 0.0,
        };
        let log = self
            .cache
            .folder("logs")?
            .join(format!("upstream-tests-{}.log", planned.name));
        let mut build = self.cargo(planned)?;
        build.arg("--no-run");
        let name = format!("build of the tests of {}", planned.name);
        if !command::logged_status(&name, &mut build, &log)?.success() {
            run.problems.push(format!(
                "does not build:\n{}\nThe whole log: {}",
                command::tail(&log),
                log.display()
            ));
            return Ok((run, None));
        }
        let listed = Listed {
            all: self.list(planned, false)?,
            ignored: self.list(planned, true)?,
        };
        run.listed = listed.all.count();
        if run.listed < planned.upstream_tests {
            run.problems.push(format!(
                "{} tests, upstream has {} (tests.toml)",
                run.listed, planned.upstream_tests
            ));
        }
        let mut tests = self.cargo(planned)?;
        tests
            .args(["--no-fail-fast", "--"])
            .args(planned.filter_arguments());
        let status =
            command::logged_status(&format!("tests of {}", planned.name), &mut tests, &log)?;
        let output = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        let output = String::from_utf8_lossy(&output);
        match Counts::parse(&output) {
            Some(counts) => run.counts = counts,
            None => run
                .problems
                .push(format!("no test result in {}", log.display())),
        }
        let failed = failed_names(&output);
        if !status.success() {
            let kept = log.with_extension("failed.log");
            fs::copy(&log, &kept).with_context(|| format!("cannot write {}", kept.display()))?;
            run.problems.push(format!(
                "{} failed ({status}); the whole log: {}",
                match failed.is_empty() {
                    true => "a test".to_owned(),
                    false => failed.join(", "),
                },
                kept.display()
            ));
        }
        let ran = run.counts.passed + run.counts.failed + run.counts.ignored;
        if run.problems.is_empty() && ran != run.listed {
            run.problems
                .push(format!("{ran} tests counted of {} listed", run.listed));
        }
        run.seconds = began.elapsed().as_secs_f64();
        say(format!("{}: {}", planned.name, run.counts.shown()));
        Ok((run, Some(listed)))
    }
}

/// Makes `target` hold what `source` holds. A file that does not differ keeps its time, by which
/// cargo knows that it need not build again; so does an adapted lock file.
fn synchronize(source: &Path, target: &Path) -> Result<()> {
    let wanted = relative_files(source)?;
    for path in relative_files(target)? {
        if !wanted.contains(&path) && path.file_name() != Some(LOCK_FILE.as_ref()) {
            fs::remove_file(target.join(&path))
                .with_context(|| format!("cannot remove {}", target.join(&path).display()))?;
        }
    }
    for path in wanted {
        let to = target.join(&path);
        let contents = fs::read(source.join(&path))?;
        let same = fs::read(&to).is_ok_and(|there| there == contents);
        if same || (path.file_name() == Some(LOCK_FILE.as_ref()) && to.exists()) {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(target))?;
        fs::write(&to, contents).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

fn relative_files(folder: &Path) -> Result<Vec<PathBuf>> {
    frontend::sources(folder)?
        .iter()
        .map(|path| Ok(path.strip_prefix(folder)?.to_owned()))
        .collect()
}

/// The tests on the sources with the whole series.
pub(crate) fn whole_series(cache: &Cache) -> Result<Results> {
    measure(cache, &[patch::series()?])
}

/// The tests on the sources before the series and after each patch of it.
pub(crate) fn each_patch(cache: &Cache) -> Result<Results> {
    let series = patch::series()?;
    let states: Vec<Vec<String>> = (0..=series.len())
        .map(|count| series[..count].to_vec())
        .collect();
    measure(cache, &states)
}

/// The tests on each state of the sources; a state must have every test of the one before it.
fn measure(cache: &Cache, states: &[Vec<String>]) -> Result<Results> {
    let plan = Plan::read()?;
    let tree = Tree::open(cache)?;
    for run in &plan.run {
        say(format!("to run: {}", run.command()));
    }
    for left_out in plan.not_run() {
        say(format!(
            "not run: {}, {} ({})",
            left_out.name, left_out.tests, left_out.reason
        ));
    }
    let mut rows = Vec::new();
    let mut before: Vec<Option<Listed>> = vec![None; plan.run.len()];
    for patches in states {
        tree.set(&plan, patches)?;
        let mut row = Row {
            patch: patches.last().cloned(),
            patch_sha256: None,
            runs: Vec::new(),
        };
        if let Some(name) = &row.patch {
            row.patch_sha256 = Some(sha256(patch::text(name)?.as_bytes()));
        }
        for (planned, before) in plan.run.iter().zip(&mut before) {
            interrupt::check()?;
            let (mut run, listed) = tree.run(planned)?;
            if let Some(listed) = listed {
                if patches.is_empty() && run.listed > planned.upstream_tests {
                    run.problems.push(format!(
                        "upstream_tests is {} in tests.toml, the sources have {}",
                        planned.upstream_tests, run.listed
                    ));
                }
                if let Some(before) = &before {
                    run.problems.extend(before.lost_in(&listed));
                }
                *before = Some(listed);
            }
            row.runs.push(run);
        }
        rows.push(row);
    }
    Ok(Results {
        dynamo: tree.pins.version.clone(),
        rows,
        left_out: plan.not_run(),
    })
}

/// Fails with every problem of `results`.
pub(crate) fn require_good(results: &Results) -> Result<()> {
    let problems = results.problems();
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

/// Makes the tested tree the whole series and calls `look` on it.
pub(crate) fn with_tested_tree(
    cache: &Cache,
    look: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let tree = Tree::open(cache)?;
    tree.set(&Plan::read()?, &patch::series()?)?;
    look(&tree.folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_and_every_part_left_out_is_of_a_pinned_crate_and_has_its_reason() {
        let plan = Plan::read().unwrap();
        let pins = Pins::read().unwrap();
        let pinned = |name: &str| pins.crates.iter().any(|pin| pin.name == name);
        assert!(plan.run.iter().all(|run| pinned(&run.name)));
        for left_out in plan.not_run() {
            assert!(pinned(&left_out.name), "{left_out:?}");
            assert!(!left_out.reason.is_empty(), "{left_out:?}");
        }
        for pin in &pins.crates {
            assert!(plan.run.iter().any(|run| run.name == pin.name));
        }
    }

    #[test]
    fn a_command_names_filters_and_what_is_skipped() {
        let run: PlannedRun = toml::from_str(
            "crate = \"dynamo-x\"\nupstream_tests = 1\narguments = [\"--lib\"]\n\
             filters = [\"a::\", \"b::\"]\nskip = [{ test = \"c\", reason = \"r\" }]\n",
        )
        .unwrap();
        assert_eq!(
            run.command(),
            "cargo test -p dynamo-x --lib -- a:: b:: --skip c"
        );
    }

    #[test]
    fn a_file_that_does_not_differ_is_not_written_again() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |folder: &tempfile::TempDir, name: &str, text: &str| {
            fs::write(folder.path().join(name), text).unwrap();
        };
        write(&source, "same", "1");
        write(&source, "changed", "2");
        write(&source, "Cargo.lock", "pristine");
        write(&target, "same", "1");
        write(&target, "changed", "1");
        write(&target, "gone", "1");
        write(&target, "Cargo.lock", "adapted");
        let modified = |name: &str| {
            fs::metadata(target.path().join(name))
                .unwrap()
                .modified()
                .unwrap()
        };
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        for name in ["same", "changed"] {
            File::options()
                .append(true)
                .open(target.path().join(name))
                .unwrap()
                .set_modified(long_ago)
                .unwrap();
        }
        synchronize(source.path(), target.path()).unwrap();
        assert_eq!(modified("same"), long_ago);
        assert_ne!(modified("changed"), long_ago);
        let read = |name: &str| fs::read_to_string(target.path().join(name)).ok();
        assert_eq!(read("changed").as_deref(), Some("2"));
        assert_eq!(read("gone"), None);
        assert_eq!(read("Cargo.lock").as_deref(), Some("adapted"));
    }
}
