// SPDX-License-Identifier: Apache-2.0

//! With the flag off the patched crates do what the registry's do: the records of one program,
//! built with either, are equal byte for byte.

mod compare;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{Cache, Key, project_root};
use crate::command;
use crate::frontend::{self, Profile};
use crate::own_crates;
use crate::patch;
use crate::progress::{Step, say};
use crate::upstream::{Pins, series_folder};
use compare::Kinds;

const NAME: &str = "kvdelta-recorder";

const WEIGHT: &str = "decode_overlap_score_weight";
const VARIABLE: &str = "DYN_ROUTER_DECODE_OVERLAP_SCORE_WEIGHT";

/// Dynamo's crates that a recorder is built with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Crates {
    Registry,
    Patched,
}

/// How a recorder is told the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Nothing,
    Field(&'static str),
    Variable(&'static str),
    /// A policy file with these parameters.
    File(&'static str),
}

/// What a recorder records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stream {
    Scheduler,
    Cards,
    Plain,
    Conditional,
    Sessions,
}

/// What must be in a record for its comparison to mean something.
type Least = &'static [(&'static str, usize)];

impl Stream {
    const ALL: [Self; 5] = [
        Self::Scheduler,
        Self::Cards,
        Self::Plain,
        Self::Conditional,
        Self::Sessions,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Cards => "cards",
            Self::Plain => "plain",
            Self::Conditional => "conditional",
            Self::Sessions => "sessions",
        }
    }

    fn least(self) -> Least {
        match self {
            Self::Scheduler => &[
                ("choice", 5000),
                ("event", 5000),
                ("load", 5000),
                ("inputs", 30),
            ],
            Self::Cards => &[("card", 16), ("checksum", 16), ("setting", 4)],
            Self::Plain | Self::Conditional | Self::Sessions => &[
                ("choice", 100),
                ("request", 100),
                ("event", 200),
                ("answer", 50),
                ("subscription", 2),
                ("discovery", 20),
            ],
        }
    }

    /// The kinds of lines that the flag changes.
    fn changed_by_the_flag(self) -> &'static [&'static str] {
        match self {
            Self::Scheduler => &["choice", "inputs"],
            Self::Cards => &["card", "checksum"],
            // With conditional disaggregation decode has an index anyway.
            Self::Conditional => &["choice"],
            Self::Plain | Self::Sessions => &["choice", "subscription"],
        }
    }
}

/// One run of a recorder over some streams.
struct Run {
    name: &'static str,
    crates: Crates,
    told: Told,
    streams: &'static [Stream],
    must: Must,
}

/// What a run's records must be.
enum Must {
    /// What others are compared with.
    Be,
    Equal(&'static str),
    Differ(&'static str),
}

const UNPATCHED: &str = "unpatched";
const UNPATCHED_FILE: &str = "unpatched, policy file";
const ON: &str = "patched, weight 4";

/// The runs, a compared one after the one that it is compared with.
const RUNS: [Run; 8] = [
    Run {
        name: UNPATCHED,
        crates: Crates::Registry,
        told: Told::Nothing,
        streams: &Stream::ALL,
        must: Must::Be,
    },
    // A record that differs from itself would show nothing.
    Run {
        name: "unpatched again",
        crates: Crates::Registry,
        told: Told::Nothing,
        streams: &Stream::ALL,
        must: Must::Equal(UNPATCHED),
    },
    Run {
        name: "patched",
        crates: Crates::Patched,
        told: Told::Nothing,
        streams: &Stream::ALL,
        must: Must::Equal(UNPATCHED),
    },
    Run {
        name: "patched, weight 0",
        crates: Crates::Patched,
        told: Told::Field("0"),
        streams: &Stream::ALL,
        must: Must::Equal(UNPATCHED),
    },
    Run {
        name: "patched, weight 0 by variable",
        crates: Crates::Patched,
        told: Told::Variable("0"),
        streams: &[Stream::Scheduler, Stream::Cards, Stream::Plain],
        must: Must::Equal(UNPATCHED),
    },
    Run {
        name: UNPATCHED_FILE,
        crates: Crates::Registry,
        told: Told::File("{}"),
        streams: &[Stream::Scheduler, Stream::Cards, Stream::Plain],
        must: Must::Be,
    },
    Run {
        name: "patched, weight 0 by policy file",
        crates: Crates::Patched,
        told: Told::File("{ decode_overlap_score_weight: 0 }"),
        streams: &[Stream::Scheduler, Stream::Cards, Stream::Plain],
        must: Must::Equal(UNPATCHED_FILE),
    },
    Run {
        name: ON,
        crates: Crates::Patched,
        // Weight 1 is what conditional disaggregation credits by itself.
        told: Told::Field("4"),
        streams: &Stream::ALL,
        must: Must::Differ(UNPATCHED),
    },
];

/// The recorders, and the folder with what they record.
struct Recorders {
    registry: PathBuf,
    patched: PathBuf,
    folder: PathBuf,
}

/// Builds both recorders, lets them record, and compares.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    tests(cache)?;
    let recorders = Recorders {
        registry: build(cache, Crates::Registry, Profile::Dev)?,
        patched: build(cache, Crates::Patched, Profile::Dev)?,
        folder: new_folder(cache)?,
    };
    let mut equal: BTreeMap<Stream, (usize, Kinds)> = BTreeMap::new();
    for run in &RUNS {
        recorders.record(run)?;
        for stream in run.streams {
            let record = recorders.read(run.name, *stream)?;
            let kinds = compare::kinds(&record)?;
            compare::enough(&kinds, stream.least())
                .with_context(|| recorders.shown(run.name, *stream))?;
            match run.must {
                Must::Be => {}
                Must::Equal(base) => {
                    recorders.equal(base, run.name, *stream, &record)?;
                    let (runs, _) = equal.entry(*stream).or_insert((0, kinds));
                    *runs += 1;
                }
                Must::Differ(base) => recorders.differ(base, run.name, *stream, &record)?,
            }
        }
    }
    for (stream, (runs, kinds)) in &equal {
        say(format!(
            "{}: {runs} records equal those of unpatched crates, each of {}",
            stream.name(),
            compare::listed(kinds)
        ));
    }
    recorders.read_cards()?;
    say(format!("the records: {}", recorders.folder.display()));
    Ok(())
}

impl Recorders {
    fn program(&self, crates: Crates) -> &Path {
        match crates {
            Crates::Registry => &self.registry,
            Crates::Patched => &self.patched,
        }
    }

    fn path(&self, run: &str, stream: Stream) -> PathBuf {
        self.folder
            .join(run)
            .join(format!("{}.jsonl", stream.name()))
    }

    fn shown(&self, run: &str, stream: Stream) -> String {
        self.path(run, stream).display().to_string()
    }

    fn read(&self, run: &str, stream: Stream) -> Result<String> {
        let path = self.path(run, stream);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// The policy file of the run at hand. Its path goes into cards and their checksums.
    fn policy(&self) -> PathBuf {
        self.folder.join("policy.yaml")
    }

    fn cards(&self, run: &str) -> PathBuf {
        self.folder.join(run).join("cards")
    }

    /// Records all streams of a run at once: what they do for most of the time is wait.
    fn record(&self, run: &Run) -> Result<()> {
        let folder = self.folder.join(run.name);
        fs::create_dir_all(&folder)?;
        if let Told::File(parameters) = run.told {
            fs::write(self.policy(), policy(parameters))?;
        }
        let step = Step::begin(format!("recording: {}", run.name));
        let records: Vec<_> = thread::scope(|scope| {
            let running: Vec<_> = run
                .streams
                .iter()
                .map(|stream| scope.spawn(|| self.record_stream(run, *stream)))
                .collect();
            running.into_iter().map(|record| record.join()).collect()
        });
        for (stream, record) in run.streams.iter().zip(records) {
            record
                .unwrap_or_else(|_| bail!("panicked"))
                .with_context(|| format!("{}, {}", run.name, stream.name()))?;
        }
        step.end();
        Ok(())
    }

    fn record_stream(&self, run: &Run, stream: Stream) -> Result<()> {
        let mut recorder = self.recorder(run.crates);
        match stream {
            Stream::Scheduler => recorder.arg("scheduler"),
            Stream::Cards => recorder
                .arg("cards")
                .arg("--cards")
                .arg(self.cards(run.name)),
            Stream::Plain | Stream::Conditional | Stream::Sessions => {
                recorder.args(["stack", "--routing", stream.name()])
            }
        };
        if stream != Stream::Scheduler {
            recorder.arg("--model").arg(self.folder.join("model"));
        }
        recorder.arg("--out").arg(self.path(run.name, stream));
        match run.told {
            Told::Nothing => &mut recorder,
            Told::Field(weight) => recorder.args(["--weight", weight]),
            Told::Variable(weight) => recorder.env(VARIABLE, weight),
            Told::File(_) => recorder.arg("--policy").arg(self.policy()),
        };
        let log = self.path(run.name, stream).with_extension("log");
        command::quiet(recorder, &log)
    }

    /// A recorder without the settings of this shell.
    fn recorder(&self, crates: Crates) -> Command {
        recorder(self.program(crates))
    }

    fn equal(&self, base: &str, run: &str, stream: Stream, record: &str) -> Result<()> {
        if let Some(difference) = compare::difference(&self.read(base, stream)?, record) {
            bail!(
                "{run}: {difference}\nthe records: {}\n             {}",
                self.shown(base, stream),
                self.shown(run, stream)
            );
        }
        Ok(())
    }

    fn differ(&self, base: &str, run: &str, stream: Stream, record: &str) -> Result<()> {
        let changed = compare::kinds_that_differ(&self.read(base, stream)?, record)?;
        for kind in stream.changed_by_the_flag() {
            ensure!(
                changed.contains(*kind),
                "{run}: the flag is on and no {kind} differs from {base}, so equal records show \
                 nothing: {}",
                self.shown(run, stream)
            );
        }
        say(format!(
            "{}: with the flag on what differs: {}",
            stream.name(),
            changed.into_iter().collect::<Vec<_>>().join(", ")
        ));
        Ok(())
    }

    /// Each build reads the cards of the other.
    fn read_cards(&self) -> Result<()> {
        let all = self.read_by(Crates::Registry, UNPATCHED)?;
        compare::enough(&compare::kinds(&all)?, &[("read", 16)])?;
        for (reader, writer) in [
            (Crates::Patched, UNPATCHED),
            (Crates::Registry, "patched"),
            (Crates::Registry, "patched, weight 0"),
            (Crates::Patched, "patched, weight 0"),
        ] {
            let read = self.read_by(reader, writer)?;
            if let Some(difference) = compare::difference(&all, &read) {
                bail!("cards of {writer}, read by {reader:?}: {difference}");
            }
        }
        let kinds = compare::kinds(&self.read_by(Crates::Patched, ON)?)?;
        compare::enough(&kinds, &[("read", 16)])?;
        let refused = self.read_by(Crates::Registry, ON)?;
        let kinds = compare::kinds(&refused)?;
        compare::enough(&kinds, &[("read", 4), ("refused", 12)])?;
        let reasons: Vec<_> = refused
            .lines()
            .filter(|line| line.contains("refused"))
            .collect();
        if let Some(other) = reasons
            .iter()
            .find(|line| !line.contains(&format!("unknown field `{WEIGHT}`")))
        {
            bail!("unpatched crates refuse a card with the weight above 0 otherwise: {other}");
        }
        say(format!(
            "cards: {} read by the other build; with the flag on unpatched crates refuse {}: {}",
            compare::kinds(&all)?.values().sum::<usize>(),
            reasons.len(),
            reasons.first().copied().unwrap_or_default()
        ));
        Ok(())
    }

    /// The record of a build that reads the cards of a run.
    fn read_by(&self, reader: Crates, writer: &str) -> Result<String> {
        let name = match reader {
            Crates::Registry => "unpatched",
            Crates::Patched => "patched",
        };
        let out = self
            .folder
            .join(writer)
            .join(format!("read by {name}.jsonl"));
        let mut recorder = self.recorder(reader);
        recorder
            .args(["read-cards", "--cards"])
            .arg(self.cards(writer))
            .arg("--out")
            .arg(&out);
        command::output(recorder)?;
        fs::read_to_string(&out).with_context(|| format!("cannot read {}", out.display()))
    }
}

/// A recorder without the settings of this shell.
pub(crate) fn recorder(program: &Path) -> Command {
    let mut recorder = Command::new(program);
    without_settings(&mut recorder);
    recorder
}

/// Takes away the settings for Dynamo that this shell has.
fn without_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("DYN_") || text == "NATS_SERVER" {
            command.env_remove(&name);
        }
    }
}

fn policy(parameters: &str) -> String {
    format!(
        "worker_selection:\n  decode: tuned\n  instances:\n    - name: tuned\n      \
         type: dynamo-default-cost-fn\n      parameters: {parameters}\n"
    )
}

/// An empty folder for the records, which stay until the next time.
fn new_folder(cache: &Cache) -> Result<PathBuf> {
    let folder = cache.folder("runs")?.join("unchanged");
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The folder of the recorder's sources.
pub(crate) fn folder() -> PathBuf {
    project_root().join("tests/patched_dynamo")
}

/// What the recorder is made of.
fn files() -> Result<Vec<PathBuf>> {
    let mut files: Vec<_> = ["Cargo.toml", "Cargo.lock", "build.rs"]
        .map(|name| folder().join(name))
        .into();
    files.extend(frontend::sources(&folder().join("src"))?);
    Ok(files)
}

/// Lints and tests of the recorder itself.
fn tests(cache: &Cache) -> Result<()> {
    let mut tests = cargo(cache, "test", Crates::Registry)?;
    tests.arg("--quiet");
    command::shown_run(tests)
}

/// `cargo test` on the package of the recorder, which has tests for patched crates alone as well.
pub(crate) fn patched_tests(cache: &Cache) -> Result<Command> {
    let mut tests = cargo(cache, "test", Crates::Patched)?;
    without_settings(&mut tests);
    Ok(tests)
}

/// A built recorder, from the cache if nothing that goes into it has changed.
pub(crate) fn build(cache: &Cache, crates: Crates, profile: Profile) -> Result<PathBuf> {
    let (name, mut key) = match crates {
        Crates::Registry => (
            "kvdelta-recorder-unpatched",
            frontend::build_key(Key::new().file(&series_folder().join("pins.toml"))?)?,
        ),
        Crates::Patched => (
            "kvdelta-recorder",
            frontend::patched_key(cache, &folder())?.file(&frontend::lock_file())?,
        ),
    };
    for file in files()? {
        let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(folder())?.to_string_lossy().into_owned();
        key = key.part(&name, &text);
    }
    if let Some(flag) = profile.flag() {
        key = key.part("profile", flag.as_bytes());
    }
    let entry = cache.entry(name, &key, |entry| {
        let mut build = cargo(cache, "build", crates)?;
        build.args(profile.flag());
        let log = cache.folder("logs")?.join(format!("{name}.log"));
        command::logged(&format!("{name} (about 850 crates when cold)"), build, &log)?;
        if crates == Crates::Patched {
            check_versions(&fs::read_to_string(copy(cache)?.join("Cargo.lock"))?)?;
        }
        let built = frontend::target(cache)?.join(profile.folder()).join(NAME);
        fs::copy(&built, entry.join(NAME))
            .with_context(|| format!("cannot copy {}", built.display()))?;
        Ok(())
    })?;
    Ok(entry.join(NAME))
}

/// A cargo command on the recorder, with clippy as the compiler of this one crate.
fn cargo(cache: &Cache, subcommand: &str, crates: Crates) -> Result<Command> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .arg(subcommand)
        .env("CARGO_TARGET_DIR", frontend::target(cache)?)
        .env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    frontend::build_environment(&mut cargo, cache)?;
    match crates {
        Crates::Registry => {
            cargo
                .arg("--locked")
                .current_dir(folder())
                .env_remove("KVDELTA_PATCHED");
        }
        Crates::Patched => {
            let pins = Pins::read()?;
            cargo
                .current_dir(patched_copy(cache, &pins)?)
                .env("KVDELTA_PATCHED", "1");
            frontend::patch_registry(&mut cargo, &pins, &patch::crates(cache)?)?;
        }
    }
    Ok(cargo)
}

fn copy(cache: &Cache) -> Result<PathBuf> {
    cache.folder("target/recorder")
}

/// The recorder's sources with a lock file for the patched crates: the committed one says where the
/// registry has them.
fn patched_copy(cache: &Cache, pins: &Pins) -> Result<PathBuf> {
    let copy = copy(cache)?;
    let tests = frontend::sources(&folder().join("tests"))?;
    for file in files()?.into_iter().chain(tests) {
        let to = copy.join(file.strip_prefix(folder())?);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        if file.file_name().is_some_and(|name| name == "Cargo.lock") {
            text = compare::lock_of_patched(&text, pins)?;
            text = own_crates::with_versions(&text, &fs::read_to_string(frontend::lock_file())?)?;
        }
        // Cargo builds again what is newer.
        if fs::read_to_string(&to).ok().as_ref() != Some(&text) {
            fs::write(&to, text).with_context(|| format!("cannot write {}", to.display()))?;
        }
    }
    Ok(copy)
}

/// Both recorders must be built with the same versions of everything else. What the patched crates
/// alone depend on has the versions of the frontend.
fn check_versions(patched: &str) -> Result<()> {
    let committed = fs::read_to_string(folder().join("Cargo.lock"))?;
    let other = compare::other_versions(&committed, &[patched])?;
    ensure!(
        other.is_empty(),
        "the patched crates were built with other versions than the registry's: {}; update \
         tests/patched_dynamo/Cargo.lock",
        other.join(", ")
    );
    let frontend = fs::read_to_string(frontend::lock_file())?;
    let added = compare::other_versions(patched, &[&committed, &frontend])?;
    ensure!(
        added.is_empty(),
        "the patched recorder was built with versions that the frontend has not: {}",
        added.join(", ")
    );
    Ok(())
}
