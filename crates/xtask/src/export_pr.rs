// SPDX-License-Identifier: Apache-2.0

//! The pull request of one phase, in the form of Dynamo's repository.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::cache::{Cache, project_root, sha256};
use crate::command;
use crate::diff_size::DiffSize;
use crate::frontend;
use crate::patch;
use crate::phase::Phase;
use crate::pr_text::{self, Expected, Facts, Header};
use crate::progress::say;
use crate::upstream::Pins;
use crate::upstream_counts::Results;
use crate::upstream_tests::{Plan, with_tested_tree};

/// What cargo adds to a package; the repository has none of it.
const OF_THE_PACKAGE: [&str; 4] = [
    "Cargo.toml",
    "Cargo.lock",
    ".cargo_vcs_info.json",
    ".cargo-ok",
];
/// What a wheel has and the repository has not.
const OF_THE_WHEEL: &str = "_version.py";
/// The repository's manifest, in a package.
const REPOSITORY_MANIFEST: &str = "Cargo.toml.orig";

/// Options of `cargo xtask export-pr`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask export-pr --phase 1                     the tree of the pinned crates with phase 1
  cargo xtask export-pr --phase 1 --onto ../dynamo    onto a checkout of Dynamo v1.6.1
  cargo xtask export-pr --phase 2a --onto ../dynamo --with-earlier
  cargo xtask test --each-patch --json results.json &&
    cargo xtask export-pr --phase 1 --onto ../dynamo --results results.json

The text (title, empty line, body) fits
  gh pr create --title \"$(head -n1 PR.md)\" --body \"$(tail -n+3 PR.md)\"

Exit codes: 0 done, 1 refused or the patch is longer than its limit, 2 an option that cannot be read.")]
pub(crate) struct Options {
    /// The phase: 1, 2a, 2b, 3 or 4, of which the series has the first ones.
    #[arg(long)]
    phase: Phase,
    /// A checkout of Dynamo, or a clean tree of it, that has the phases before this one.
    #[arg(long, value_name = "DIR")]
    onto: Option<PathBuf>,
    /// Apply the phases before this one as well where they are missing.
    #[arg(long, requires = "onto")]
    with_earlier: bool,
    /// Without --onto: write the tree to this folder, which must not exist [dynamo-phase-PHASE].
    #[arg(long, value_name = "DIR", conflicts_with = "onto")]
    out: Option<PathBuf>,
    /// Write the pull request's text to this file, which must not exist [PR.md beside the tree].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// What `cargo xtask test --each-patch --json FILE` wrote.
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// Sign off with this instead of git's user.name and user.email.
    #[arg(long, value_name = "NAME <MAIL>")]
    signoff: Option<String>,
}

/// Runs `cargo xtask export-pr`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    let default_out = PathBuf::from(format!("dynamo-phase-{}", options.phase));
    let tree = options
        .onto
        .as_ref()
        .or(options.out.as_ref())
        .unwrap_or(&default_out);
    if options.onto.is_some() && !tree.is_dir() {
        bail!("--onto: {} is no folder", tree.display());
    }
    let text_path = match &options.text {
        Some(path) => path.clone(),
        None => beside(tree)?,
    };
    for (option, path) in [
        ("--text", Some(&text_path)),
        ("--out", options.onto.is_none().then_some(tree)),
    ] {
        if let Some(path) = path.filter(|path| fs::symlink_metadata(path).is_ok()) {
            bail!("{option}: {} exists, name another", path.display());
        }
    }
    let signoff = match &options.signoff {
        Some(signoff) => signoff.clone(),
        None => git_identity()?,
    };
    pr_text::check_signoff(&signoff)?;
    let results = options.results.as_deref().map(read_results).transpose()?;
    let sources = Sources::of_phase(cache, options.phase)?;
    let text = sources.text(results.as_ref(), &signoff)?;
    let writes = match options.onto {
        Some(_) => {
            let writes = sources.onto(tree, options.with_earlier)?;
            require_clean(tree, writes.keys())?;
            require_no_links(tree, writes.keys())?;
            Some(writes)
        }
        None => None,
    };
    with_new_file(&text_path, &text, || match &writes {
        Some(writes) => {
            for (path, contents) in writes {
                write(&tree.join(path), contents)?;
                println!("{}", tree.join(path).display());
            }
            Ok(())
        }
        None => {
            sources.write_tree(tree)?;
            println!("{}", tree.display());
            Ok(())
        }
    })?;
    println!("{}", text_path.display());
    println!("{}", pr_text::size_line(sources.size, sources.limit));
    if results.is_none() {
        println!("no results: Validation names the commands alone (--results FILE)");
    }
    sources.require_limit()?;
    Ok(ExitCode::SUCCESS)
}

/// For `cargo xtask test`: every phase in turn onto a clean tree of the pinned sources gives, byte
/// for byte, the Rust and Python files that upstream's tests run on.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let tree = folder.path().join("dynamo");
    let series = patch::series()?;
    let pins = Pins::read()?;
    Sources::unpatched(cache)?.write_tree(&tree)?;
    for place in 1..=series.len() {
        let phase = Phase::at(place)?;
        let sources = Sources::of_phase(cache, phase)?;
        for (path, contents) in sources.onto(&tree, false)? {
            write(&tree.join(path), &contents)?;
        }
        sources.text(None, "Name <user@host>")?;
        say(format!(
            "phase {phase}: {}",
            pr_text::size_line(sources.size, sources.limit)
        ));
        sources.require_limit()?;
        if place > 1 {
            check_with_earlier(cache, &sources, &tree)?;
        }
    }
    with_tested_tree(cache, |tested| {
        let crates = pins.crates.iter().map(|pin| (&pin.path, "rs"));
        let wheels = pins.wheels.iter().map(|wheel| (&wheel.path, "py"));
        let mut compared = 0;
        for (folder, extension) in crates.chain(wheels) {
            let files = |root: &Path| -> Result<BTreeSet<PathBuf>> {
                let files = relative_files(root, &root.join(folder))?.into_iter();
                let is_source = |path: &PathBuf| {
                    path.extension().is_some_and(|of| of == extension)
                        && repository_path(path, &pins).is_some()
                };
                Ok(files.filter(is_source).collect())
            };
            let exported = files(&tree)?;
            if let Some(path) = exported.symmetric_difference(&files(tested)?).next() {
                bail!(
                    "{} is in one of the exported and the tested tree",
                    path.display()
                );
            }
            for path in &exported {
                if fs::read(tree.join(path))? != fs::read(tested.join(path))? {
                    bail!("{}: exported and tested differ", path.display());
                }
            }
            compared += exported.len();
        }
        say(format!(
            "{compared} Rust and Python files of the exported tree are those that upstream's tests run on"
        ));
        Ok(())
    })
}

/// Onto unpatched sources a phase goes with the ones before it alone, and gives what it gives after
/// them, which is `tree`.
fn check_with_earlier(cache: &Cache, sources: &Sources, tree: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    Sources::unpatched(cache)?.write_tree(folder.path())?;
    if sources.onto(folder.path(), false).is_ok() {
        bail!("{}: went onto unpatched sources", sources.patch_name);
    }
    for (path, contents) in sources.onto(folder.path(), true)? {
        write(&folder.path().join(path), &contents)?;
    }
    let files = relative_files(tree, tree)?;
    if files != relative_files(folder.path(), folder.path())? {
        bail!("--with-earlier: the tree has other files than one phase after the other gives");
    }
    for path in files {
        if fs::read(tree.join(&path))? != fs::read(folder.path().join(&path))? {
            bail!("--with-earlier: {} differs", path.display());
        }
    }
    Ok(())
}

/// The files under `folder`, by their path in `root`.
fn relative_files(root: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let files = frontend::sources(folder)?;
    files
        .iter()
        .map(|path| Ok(path.strip_prefix(root)?.to_owned()))
        .collect()
}

/// Contents of files by their path in the repository; `None`: no such file.
type State = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// The pinned sources with the phases up to one, and what that phase changes.
#[derive(Debug)]
struct Sources {
    pins: Pins,
    /// The last of these phases; `None`: the sources are unpatched.
    phase: Option<Phase>,
    /// The patch before this phase's.
    patch_before: Option<String>,
    patch_name: String,
    patch_text: String,
    size: DiffSize,
    limit: Option<usize>,
    /// The packages' files after this phase.
    folder: tempfile::TempDir,
    /// The files that this phase or an earlier one changes, after 0, 1, ... phases.
    states: Vec<State>,
    /// Files of the crates that come with this phase and those before it.
    crates: Vec<NewCrate>,
}

#[derive(Debug)]
struct NewCrate {
    name: &'static str,
    phase: Phase,
    files: BTreeMap<PathBuf, Vec<u8>>,
}

impl Sources {
    fn unpatched(cache: &Cache) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        patch::prepare_with(cache, folder.path(), &[])?;
        Ok(Self {
            pins: Pins::read()?,
            phase: None,
            patch_before: None,
            patch_name: String::new(),
            patch_text: String::new(),
            size: DiffSize::default(),
            limit: None,
            folder,
            states: vec![State::new()],
            crates: Vec::new(),
        })
    }

    fn of_phase(cache: &Cache, phase: Phase) -> Result<Self> {
        let (series, place) = (patch::series()?, phase.place());
        if place > series.len() {
            bail!(
                "--phase {phase}: the series ends with phase {}",
                Phase::at(series.len())?
            );
        }
        let mut sources = Self::unpatched(cache)?;
        let texts: Vec<String> = series[..place]
            .iter()
            .map(|name| patch::text(name))
            .collect::<Result<_>>()?;
        let mut touched = BTreeSet::new();
        for (name, text) in series.iter().zip(&texts) {
            let files = touched_files(text, &sources.pins).with_context(|| name.clone())?;
            touched.extend(files);
        }
        let root = sources.folder.path();
        sources.states = vec![snapshot(root, &touched)?];
        for (index, (name, text)) in series.iter().zip(&texts).enumerate() {
            if index + 1 == place {
                sources.size = apply_counted(root, text).with_context(|| name.clone())?;
            } else {
                patch::apply(root, text).with_context(|| name.clone())?;
            }
            sources.states.push(snapshot(root, &touched)?);
        }
        sources.phase = Some(phase);
        sources.patch_before = place.checked_sub(2).map(|before| series[before].clone());
        sources.patch_name.clone_from(&series[place - 1]);
        sources.patch_text.clone_from(&texts[place - 1]);
        sources.limit = phase.line_limit();
        sources.crates = new_crates(&project_root(), phase)?;
        Ok(sources)
    }

    /// The pull request's text.
    fn text(&self, results: Option<&Results>, signoff: &str) -> Result<String> {
        let header = Header::parse(&self.patch_text).with_context(|| self.patch_name.clone())?;
        if let Some(phase) = self.phase.filter(|phase| *phase != header.phase) {
            bail!(
                "{}: Origin names phase {}, its place in the series is that of phase {phase}",
                self.patch_name,
                header.phase
            );
        }
        let plan = Plan::read()?;
        let commands: Vec<String> = plan.run.iter().map(|run| run.command()).collect();
        let new_crates: Vec<String> = self
            .crates
            .iter()
            .filter(|new| Some(new.phase) == self.phase)
            .map(|new| new.name.to_owned())
            .collect();
        let sha256_of = |text: &str| sha256(text.as_bytes());
        let before = match &self.patch_before {
            Some(name) => Some((name.as_str(), sha256_of(&patch::text(name)?))),
            None => None,
        };
        let expected = Expected {
            version: &self.pins.version,
            commands: &commands,
            before: before
                .as_ref()
                .map(|(name, sha256)| (*name, sha256.as_str())),
            patch: (&self.patch_name, &sha256_of(&self.patch_text)),
        };
        let measured = results
            .map(|results| pr_text::rows_of(results, &expected).context("--results"))
            .transpose()?;
        Ok(pr_text::text(
            &header,
            &Facts {
                base: (&self.pins.version, &self.pins.commit),
                size: self.size,
                limit: self.limit,
                new_crates: &new_crates,
                commands: &commands,
                left_out: &plan.not_run(),
                measured,
                signoff,
            },
        ))
    }

    /// Writes all files in the repository's layout.
    fn write_tree(&self, target: &Path) -> Result<()> {
        let root = self.folder.path();
        for path in frontend::sources(root)? {
            let relative = path.strip_prefix(root)?;
            if let Some(exported) = repository_path(relative, &self.pins) {
                write(&target.join(exported), &fs::read(&path)?)?;
            }
        }
        for new in &self.crates {
            for (path, contents) in &new.files {
                write(&target.join(path), contents)?;
            }
        }
        Ok(())
    }

    /// What is to be written to the tree `target` of Dynamo.
    fn onto(&self, target: &Path, with_earlier: bool) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
        let found: State = self.states[0]
            .keys()
            .map(|path| Ok((path.clone(), read_if_there(&target.join(path))?)))
            .collect::<Result<_>>()?;
        let there = phases_there(&self.states, &found, with_earlier).with_context(|| {
            format!(
                "{}: nothing was written (pinned is Dynamo {}, commit {})",
                target.display(),
                self.pins.version,
                self.pins.commit
            )
        })?;
        let mut writes = BTreeMap::new();
        for (path, contents) in self.states.last().into_iter().flatten() {
            match contents {
                Some(contents) if found[path].as_ref() != Some(contents) => {
                    writes.insert(path.clone(), contents.clone());
                }
                _ => {}
            }
        }
        let manifest_path = PathBuf::from("Cargo.toml");
        let mut manifest = read_if_there(&target.join(&manifest_path))?
            .map(|manifest| String::from_utf8(manifest).context("Cargo.toml is no text"))
            .transpose()?;
        for new in self.crates.iter().filter(|new| new.phase.place() > there) {
            for (path, contents) in &new.files {
                match read_if_there(&target.join(path))? {
                    Some(found) if found != *contents => bail!(
                        "{}: exists and differs from this clone's; nothing was written",
                        target.join(path).display()
                    ),
                    Some(_) => {}
                    None => {
                        writes.insert(path.clone(), contents.clone());
                    }
                }
            }
            if let Some(manifest) = &mut manifest {
                let with = pr_text::with_member(manifest, new.name)?;
                if with != *manifest {
                    writes.insert(manifest_path.clone(), with.clone().into_bytes());
                    *manifest = with;
                }
            }
        }
        Ok(writes)
    }

    fn require_limit(&self) -> Result<()> {
        match self.limit {
            Some(limit) if self.size.source.sum() > limit => bail!(
                "{}: {} lines outside tests, new crates and docs, the limit of its phase is {limit}",
                self.patch_name,
                self.size.source.sum()
            ),
            _ => Ok(()),
        }
    }
}

/// How many phases the tree has whose files are `found`; `states` are those files after 0, 1, ...
/// phases, the last of which is to be applied.
fn phases_there(states: &[State], found: &State, with_earlier: bool) -> Result<usize> {
    let place = states.len() - 1;
    let phase = Phase::at(place)?;
    match states.iter().rposition(|state| state == found) {
        Some(there) if there == place => bail!("phase {phase} is there already"),
        Some(there) if there + 1 == place || with_earlier => Ok(there),
        Some(there) => bail!(
            "phase {} comes before {phase} and is missing: apply what is missing first, or add \
             --with-earlier",
            Phase::at(there + 1)?
        ),
        None => {
            let unknown = |path: &&PathBuf| states.iter().all(|state| state[*path] != found[*path]);
            let differs = |path: &&PathBuf| states[place - 1][*path] != found[*path];
            let path = found
                .keys()
                .find(unknown)
                .or_else(|| found.keys().find(differs))
                .context("the files are those of no phase")?;
            let what = if found[path].is_none() {
                "is missing"
            } else {
                "is there and differs"
            };
            let wanted = match place - 1 {
                0 => "the pinned source".to_owned(),
                earlier => format!("the pinned source after phase {}", Phase::at(earlier)?),
            };
            bail!("{} {what}: it is not {wanted}", path.display())
        }
    }
}

/// Where a file of the packages is in the repository; `None`: it is the package's alone.
fn repository_path(path: &Path, pins: &Pins) -> Option<PathBuf> {
    for pin in &pins.crates {
        if let Ok(inside) = path.strip_prefix(&pin.path) {
            if inside == Path::new(REPOSITORY_MANIFEST) {
                return Some(Path::new(&pin.path).join("Cargo.toml"));
            }
            if OF_THE_PACKAGE.iter().any(|name| inside == Path::new(name)) {
                return None;
            }
        }
    }
    let in_wheel = pins
        .wheels
        .iter()
        .any(|wheel| path.starts_with(&wheel.path));
    if in_wheel && path.ends_with(OF_THE_WHEEL) {
        return None;
    }
    Some(path.to_owned())
}

/// The package's files that a patch changes and the repository has.
fn touched_files(text: &str, pins: &Pins) -> Result<Vec<PathBuf>> {
    let all: Vec<PathBuf> = patch::changed_lines(text)?
        .into_iter()
        .map(|changed| changed.path)
        .collect();
    for pin in &pins.crates {
        let changes = |name: &str| all.contains(&Path::new(&pin.path).join(name));
        if changes("Cargo.toml") != changes(REPOSITORY_MANIFEST) {
            bail!(
                "it changes one of {0}/Cargo.toml, which cargo wrote, and {0}/{REPOSITORY_MANIFEST}, \
                 the repository's: change both",
                pin.path
            );
        }
        if changes("Cargo.lock") {
            bail!(
                "it changes {}/Cargo.lock, which is the package's alone: leave it out",
                pin.path
            );
        }
    }
    Ok(all
        .into_iter()
        .filter(|path| repository_path(path, pins).is_some())
        .collect())
}

fn snapshot(root: &Path, touched: &BTreeSet<PathBuf>) -> Result<State> {
    let pins = Pins::read()?;
    let mut state = State::new();
    for path in touched {
        if let Some(exported) = repository_path(path, &pins) {
            state.insert(exported, read_if_there(&root.join(path))?);
        }
    }
    Ok(state)
}

/// Applies a patch under `root` and counts its lines.
fn apply_counted(root: &Path, text: &str) -> Result<DiffSize> {
    let pins = Pins::read()?;
    let contents = |path: &Path| -> Result<String> {
        let bytes = read_if_there(&root.join(path))?.unwrap_or_default();
        Ok(String::from_utf8(bytes)?)
    };
    let changed: Vec<_> = patch::changed_lines(text)?
        .into_iter()
        .filter(|changed| repository_path(&changed.path, &pins).is_some())
        .collect();
    let old: Vec<String> = changed
        .iter()
        .map(|changed| contents(&changed.path))
        .collect::<Result<_>>()?;
    patch::apply(root, text)?;
    let mut size = DiffSize::default();
    for (changed, old) in changed.iter().zip(&old) {
        size.count(changed, old, &contents(&changed.path)?)?;
    }
    Ok(size)
}

/// The crates of the phases up to `phase` that this clone has, at their place in the repository.
fn new_crates(clone: &Path, phase: Phase) -> Result<Vec<NewCrate>> {
    let mut crates = Vec::new();
    for of in Phase::ALL.into_iter().filter(|of| *of <= phase) {
        for name in of.crates() {
            let folder = clone.join("crates").join(name);
            if !folder.exists() {
                if of == phase {
                    say(format!(
                        "{name}: this clone has no such crate, the patch comes alone"
                    ));
                }
                continue;
            }
            let mut list = Command::new("git");
            list.args(["ls-files", "-z"]).current_dir(&folder);
            let mut files = BTreeMap::new();
            for file in command::output(list)?.split_terminator('\0') {
                let contents = fs::read(folder.join(file))
                    .with_context(|| format!("cannot read {}", folder.join(file).display()))?;
                files.insert(Path::new("lib").join(name).join(file), contents);
            }
            crates.push(NewCrate {
                name,
                phase: of,
                files,
            });
        }
    }
    Ok(crates)
}

/// Refuses a git tree in which a file that is to be written has changes that are not committed.
fn require_clean<'a>(tree: &Path, paths: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    let mut inside = Command::new("git");
    inside
        .args(["rev-parse", "--is-inside-work-tree"])
        .env("LC_ALL", "C")
        .current_dir(tree);
    match command::output(inside) {
        Ok(_) => {}
        // Not the words of a .git that leads nowhere: "not a git repository: <path>".
        Err(error) if format!("{error:#}").contains("not a git repository (or any") => {
            return Ok(());
        }
        Err(error) => {
            return Err(error).with_context(|| {
                format!(
                    "{}: whether it has changes cannot be told; nothing was written",
                    tree.display()
                )
            });
        }
    }
    let mut status = Command::new("git");
    status
        .args(["status", "--porcelain", "--untracked-files=all", "--"])
        .args(paths)
        .current_dir(tree);
    let dirty = command::output(status)?;
    if let Some(line) = dirty.lines().next() {
        bail!(
            "{}: {} has changes that are not committed; nothing was written",
            tree.display(),
            line.get(3..).unwrap_or(line)
        );
    }
    Ok(())
}

/// Refuses a tree in which a file that is to be written, or a folder on its way, is a symbolic
/// link: what it leads to need not be in the tree.
fn require_no_links<'a>(tree: &Path, paths: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    for path in paths {
        let mut on_the_way: Vec<&Path> = path.ancestors().collect();
        // The tree itself is what the option names.
        on_the_way.pop();
        for part in on_the_way.iter().rev() {
            let full = tree.join(part);
            if fs::symlink_metadata(&full).is_ok_and(|metadata| metadata.is_symlink()) {
                bail!("{} is a symbolic link; nothing was written", full.display());
            }
        }
    }
    Ok(())
}

/// Makes the file `path`, calls `first`, and fills the file; without success of `first` it is
/// removed again.
fn with_new_file(path: &Path, text: &str, first: impl FnOnce() -> Result<()>) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    let mut file = File::create_new(path)
        .with_context(|| format!("--text: cannot write {}", path.display()))?;
    if let Err(error) = first() {
        // The first error is the one to tell.
        let _ = fs::remove_file(path);
        return Err(error);
    }
    file.write_all(text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}

fn git_identity() -> Result<String> {
    let ask = |key: &str| -> Result<String> {
        let mut git = Command::new("git");
        git.args(["config", key]).current_dir(project_root());
        let value = command::output(git).with_context(|| {
            format!("git has no {key}: set it, or give --signoff \"Name <user@host>\"")
        })?;
        Ok(value.trim().to_owned())
    };
    Ok(format!("{} <{}>", ask("user.name")?, ask("user.email")?))
}

fn beside(tree: &Path) -> Result<PathBuf> {
    let full = std::path::absolute(tree)?;
    let parent = full
        .parent()
        .with_context(|| format!("{} has no folder around it: give --text", tree.display()))?;
    Ok(parent.join("PR.md"))
}

fn read_results(path: &Path) -> Result<Results> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("--results: cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "--results: {} is not what `cargo xtask test --each-patch --json` writes",
            path.display()
        )
    })
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn write(path: &Path, contents: &[u8]) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    fs::write(path, contents).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::tests::pins;

    #[test]
    fn the_repository_has_its_own_manifest_and_nothing_that_cargo_added() {
        let mapped = |path: &str| repository_path(Path::new(path), &pins(""));
        assert_eq!(
            mapped("lib/x/Cargo.toml.orig"),
            Some("lib/x/Cargo.toml".into())
        );
        for name in ["Cargo.toml", "Cargo.lock", ".cargo_vcs_info.json"] {
            assert_eq!(mapped(&format!("lib/x/{name}")), None);
        }
        assert_eq!(mapped("components/dynamo/vllm/_version.py"), None);
        for path in [
            "lib/x/src/lib.rs",
            "lib/x/tests/data/Cargo.toml",
            "components/dynamo/vllm/handlers.py",
            "lib/x/_version.py",
        ] {
            assert_eq!(mapped(path), Some(path.into()));
        }
    }

    #[test]
    fn a_patch_changes_both_manifests_or_none_and_no_lock_file() {
        let change = |name: &str| {
            format!(
                "diff --git a/lib/x/{name} b/lib/x/{name}\n--- a/lib/x/{name}\n+++ b/lib/x/{name}\n\
                 @@ -1 +1 @@\n-a\n+b\n"
            )
        };
        let both = format!("{}{}", change("Cargo.toml"), change("Cargo.toml.orig"));
        assert_eq!(
            touched_files(&both, &pins("")).unwrap(),
            [PathBuf::from("lib/x/Cargo.toml.orig")]
        );
        for one in ["Cargo.toml", "Cargo.toml.orig"] {
            let error = touched_files(&change(one), &pins("")).unwrap_err();
            assert!(error.to_string().contains("change both"), "{error}");
        }
        let error = touched_files(&change("Cargo.lock"), &pins("")).unwrap_err();
        assert!(error.to_string().contains("leave it out"), "{error}");
    }

    fn state(files: &[(&str, Option<&str>)]) -> State {
        files
            .iter()
            .map(|(path, contents)| {
                (
                    PathBuf::from(path),
                    contents.map(|contents| contents.as_bytes().to_vec()),
                )
            })
            .collect()
    }

    #[test]
    fn a_tree_must_be_the_pinned_one_after_the_earlier_phases() {
        let states = [
            state(&[("a", Some("0")), ("b", None)]),
            state(&[("a", Some("1")), ("b", None)]),
            state(&[("a", Some("1")), ("b", Some("2"))]),
        ];
        let there = |found: &State, with_earlier| phases_there(&states, found, with_earlier);
        assert_eq!(there(&states[1], false).unwrap(), 1);
        assert_eq!(there(&states[0], true).unwrap(), 0);
        for (found, said) in [
            (states[0].clone(), "phase 1 comes before 2a"),
            (states[2].clone(), "phase 2a is there already"),
            (
                state(&[("a", Some("other")), ("b", None)]),
                "a is there and differs",
            ),
            (state(&[("a", None), ("b", None)]), "a is missing"),
            (
                state(&[("a", Some("0")), ("b", Some("2"))]),
                "a is there and differs",
            ),
        ] {
            let error = there(&found, false).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn only_a_file_that_is_to_be_written_must_be_clean() {
        let folder = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| {
            let mut git = Command::new("git");
            git.args(arguments).current_dir(folder.path());
            command::output(git).unwrap()
        };
        fs::write(folder.path().join("a"), "1").unwrap();
        let paths = [PathBuf::from("a")];
        assert!(require_clean(folder.path(), paths.iter()).is_ok());
        git(&["init", "--quiet"]);
        git(&["add", "a"]);
        git(&[
            "-c",
            "user.name=n",
            "-c",
            "user.email=e",
            "commit",
            "--quiet",
            "-m",
            "m",
        ]);
        fs::write(folder.path().join("b"), "untracked").unwrap();
        assert!(require_clean(folder.path(), paths.iter()).is_ok());
        fs::write(folder.path().join("a"), "2").unwrap();
        let error = require_clean(folder.path(), paths.iter()).unwrap_err();
        assert!(error.to_string().contains("a has changes"), "{error}");
    }

    #[test]
    fn a_repository_that_git_cannot_read_is_not_taken_for_none() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".git"), "gitdir: /no/such/folder\n").unwrap();
        let paths = [PathBuf::from("a")];
        let error = require_clean(folder.path(), paths.iter()).unwrap_err();
        let error = format!("{error:#}");
        for part in ["nothing was written", "/no/such/folder"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_link_on_the_way_to_a_file_is_refused() {
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let tree = folder.path().join("tree");
        fs::create_dir_all(folder.path().join("real/lib")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("real"), &tree).unwrap();
        let check = |path: &str| require_no_links(&tree, [PathBuf::from(path)].iter());
        assert!(check("lib/a/new.rs").is_ok(), "the tree itself may be one");
        std::os::unix::fs::symlink(elsewhere.path(), tree.join("lib/a")).unwrap();
        std::os::unix::fs::symlink("/no/such/file", tree.join("lib/file")).unwrap();
        for (path, link) in [("lib/a/new.rs", "lib/a"), ("lib/file", "lib/file")] {
            let error = check(path).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{link} is a symbolic link")),
                "{error}"
            );
        }
    }

    #[test]
    fn the_text_is_there_if_the_tree_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/PR.md");
        let error = with_new_file(&path, "text", || {
            assert!(path.exists());
            bail!("the disk is full")
        });
        assert_eq!(error.unwrap_err().to_string(), "the disk is full");
        assert!(!path.exists());
        with_new_file(&path, "text", || Ok(())).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        let again = with_new_file(&path, "other", || panic!("the tree must not be written"));
        assert!(again.unwrap_err().to_string().contains("PR.md"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }

    #[test]
    fn a_crate_that_this_clone_lacks_is_left_out() {
        let clone = tempfile::tempdir().unwrap();
        assert!(new_crates(clone.path(), Phase::Four).unwrap().is_empty());
    }

    #[test]
    fn the_transfer_crate_comes_with_phase_3_and_stands_on_crates_that_are_there() {
        let before = new_crates(&project_root(), Phase::TwoB).unwrap();
        let after = new_crates(&project_root(), Phase::Three).unwrap();
        let [new] = &after[before.len()..] else {
            panic!("{} crates come with phase 3", after.len() - before.len());
        };
        assert_eq!((new.name, new.phase), ("kvdelta-transfer", Phase::Three));
        let manifest = &new.files[Path::new("lib/kvdelta-transfer/Cargo.toml")];
        let manifest: toml::Table = toml::from_str(str::from_utf8(manifest).unwrap()).unwrap();
        for table in ["dependencies", "dev-dependencies"] {
            let dependencies = manifest[table].as_table().unwrap().keys();
            for own in dependencies.filter(|name| name.starts_with("kvdelta-")) {
                assert!(before.iter().any(|there| there.name == own), "{own}");
            }
        }
    }

    #[test]
    fn every_patch_of_the_series_has_the_text_of_a_pull_request() {
        for (index, name) in patch::series().unwrap().iter().enumerate() {
            let header = Header::parse(&patch::text(name).unwrap());
            let header = header.unwrap_or_else(|error| panic!("{name}: {error:#}"));
            assert_eq!(header.phase.place(), index + 1, "{name}");
        }
    }
}
