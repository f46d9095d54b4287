// SPDX-License-Identifier: Apache-2.0

//! The patch series: applied in order to the pinned sources, with neither offset nor fuzz.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use diffy::patch_set::{FileOperation, FilePatch, ParseOptions, PatchSet};
use diffy::{Hunk, Line};

use crate::cache::{Cache, Key};
use crate::frontend::sources;
use crate::progress::say;
use crate::upstream::{Pins, series_folder};
use crate::workers;

/// Options of `cargo xtask patch`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask patch                  prints the folder of the patched sources
  cargo xtask patch --check          only tries: exit code 0 if every patch applies
  cargo xtask patch --out dynamo     writes the patched sources to a new folder
  cargo xtask patch --out dynamo --with optional/0001-decode-index.patch
  cargo xtask patch --python overlay writes Dynamo's patched Python packages to a new folder; workers
                                     of ai-dynamo 1.6.1 run them with PYTHONPATH=overlay")]
pub(crate) struct Options {
    /// Only try; write nothing outside a temporary folder.
    #[arg(long)]
    check: bool,
    /// Write the patched sources to this folder, which must not exist.
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    out: Option<PathBuf>,
    /// Write the Python packages that the series changes to this folder, which must not exist.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["check", "out"])]
    python: Option<PathBuf>,
    /// Apply this optional patch on top of the series.
    #[arg(long, value_name = "PATCH", requires = "out")]
    with: Vec<String>,
}

/// Runs `cargo xtask patch`.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    if options.check {
        check(cache)?;
    } else if let Some(out) = &options.out {
        let patches = [series()?, options.with.clone()].concat();
        new_folder("--out", out, |folder| prepare_with(cache, folder, &patches))?;
    } else if let Some(out) = &options.python {
        new_folder("--python", out, |folder| workers::write(cache, folder))?;
    } else {
        println!("{}", patched(cache)?.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes the folder `out` of an option with what `fill` writes, and prints it.
fn new_folder(option: &str, out: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if out.exists() {
        bail!("{} exists: name a folder that does not", out.display());
    }
    let parent = out.parent().filter(|parent| *parent != Path::new(""));
    let scratch = tempfile::tempdir_in(parent.unwrap_or(Path::new(".")))
        .with_context(|| format!("{option}: cannot make {}", out.display()))?;
    fill(scratch.path())?;
    fs::rename(scratch.keep(), out).with_context(|| format!("cannot make {}", out.display()))?;
    println!("{}", out.display());
    Ok(())
}

/// Tries the series on the pinned sources in a temporary folder, and each optional patch on top of it.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let folder = tempfile::tempdir()?;
    prepare(cache, folder.path())?;
    say("every patch of the series applies");
    for name in optional()? {
        let folder = tempfile::tempdir()?;
        let patches = [series()?, vec![name]].concat();
        prepare_with(cache, folder.path(), &patches)?;
    }
    Ok(())
}

/// The patches in `optional`, which no build here contains.
fn optional() -> Result<Vec<String>> {
    let folder = series_folder().join("optional");
    let files =
        fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names = Vec::new();
    for file in files {
        names.push(format!("optional/{}", file?.file_name().display()));
    }
    names.sort();
    Ok(names)
}

/// The patched sources in the cache, made when they are not there: the layout of Dynamo's
/// repository, with the crates and wheels of the pins alone.
pub(crate) fn patched(cache: &Cache) -> Result<PathBuf> {
    cache.entry("dynamo-patched", &key()?, |target| prepare(cache, target))
}

/// What decides the patched sources: the pins, the series and its patches.
pub(crate) fn key() -> Result<Key> {
    let mut key = Key::new()
        .file(&series_folder().join("pins.toml"))?
        .file(&series_folder().join("series"))?;
    for name in series()? {
        key = key.file(&series_folder().join(name))?;
    }
    Ok(key)
}

/// The crates of the patched sources, in an entry of their own for builds: what changes Python or the text
/// above a diff must not build Dynamo again.
pub(crate) fn crates(cache: &Cache) -> Result<PathBuf> {
    let pins = Pins::read()?;
    let patched = patched(cache)?;
    let key = crates_key_of(&patched, &pins, &changed()?)?;
    cache.entry("dynamo-crates", &key, |target| {
        for pin in &pins.crates {
            let folder = patched.join(&pin.path);
            for file in sources(&folder)? {
                let to = target.join(file.strip_prefix(&patched)?);
                fs::create_dir_all(to.parent().unwrap_or(target))?;
                fs::copy(&file, &to).with_context(|| format!("cannot write {}", to.display()))?;
            }
        }
        Ok(())
    })
}

/// What decides those crates: the pins, and the files of crates that the series changes.
pub(crate) fn crates_key(cache: &Cache) -> Result<Key> {
    crates_key_of(&patched(cache)?, &Pins::read()?, &changed()?)
}

fn crates_key_of(patched: &Path, pins: &Pins, changed: &BTreeSet<PathBuf>) -> Result<Key> {
    let of_a_crate = |path: &&PathBuf| pins.crates.iter().any(|pin| path.starts_with(&pin.path));
    let mut key = Key::new().file(&series_folder().join("pins.toml"))?;
    for path in changed.iter().filter(of_a_crate) {
        let file = patched.join(path);
        let contents =
            fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        key = key.part(&path.to_string_lossy(), &contents);
    }
    Ok(key)
}

/// The files that the series changes.
pub(crate) fn changed() -> Result<BTreeSet<PathBuf>> {
    let mut changed = BTreeSet::new();
    for name in series()? {
        changed.extend(
            changed_lines(&text(&name)?)?
                .into_iter()
                .map(|file| file.path),
        );
    }
    Ok(changed)
}

/// Unpacks the pinned sources under `target` and applies the series to them.
fn prepare(cache: &Cache, target: &Path) -> Result<()> {
    let series = series()?;
    if series.is_empty() {
        bail!("the series names no patch");
    }
    prepare_with(cache, target, &series)
}

/// Unpacks the pinned sources under `target` and applies these patches of the series to them.
pub(crate) fn prepare_with(cache: &Cache, target: &Path, patches: &[String]) -> Result<()> {
    let pins = Pins::read()?;
    say(format!(
        "upstream sources: {} crates and the Python files of {} wheel of Dynamo {}",
        pins.crates.len(),
        pins.wheels.len(),
        pins.version
    ));
    pins.unpack(&pins.fetch(cache)?, target)?;
    for name in patches {
        apply(target, &text(name)?).with_context(|| format!("{name} does not apply"))?;
        say(format!("applied {name}"));
    }
    Ok(())
}

/// The text of a patch of the series.
pub(crate) fn text(name: &str) -> Result<String> {
    let path = series_folder().join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// The names in `series`, in order; `#` begins a remark.
pub(crate) fn series() -> Result<Vec<String>> {
    let path = series_folder().join("series");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}

/// The lines that a patch changes in one file, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChangedLines {
    /// The file.
    pub(crate) path: PathBuf,
    /// Lines of the new file that the patch adds.
    pub(crate) added: Vec<usize>,
    /// Lines of the old file that the patch removes.
    pub(crate) removed: Vec<usize>,
}

/// The files that the patch `text` changes, in its order, and their changed lines.
pub(crate) fn changed_lines(text: &str) -> Result<Vec<ChangedLines>> {
    PatchSet::parse(text, ParseOptions::gitdiff())
        .map(|file| {
            let file = file.context("not a patch in git's format")?;
            let (path, _) = target(&file)?;
            let hunks = hunks(&file, &path)?;
            let (mut added, mut removed) = (Vec::new(), Vec::new());
            for hunk in hunks {
                let mut old = first_index(hunk.old_range().start(), hunk.old_range().is_empty());
                let mut new = first_index(hunk.new_range().start(), hunk.new_range().is_empty());
                for line in hunk.lines() {
                    if !matches!(line, Line::Insert(_)) {
                        old += 1;
                    }
                    if !matches!(line, Line::Delete(_)) {
                        new += 1;
                    }
                    match line {
                        Line::Insert(_) => added.push(new),
                        Line::Delete(_) => removed.push(old),
                        Line::Context(_) => {}
                    }
                }
            }
            Ok(ChangedLines {
                path,
                added,
                removed,
            })
        })
        .collect()
}

/// Applies one patch under `root`, wholly or not at all.
pub(crate) fn apply(root: &Path, text: &str) -> Result<()> {
    let mut changed: BTreeMap<PathBuf, String> = BTreeMap::new();
    for file in PatchSet::parse(text, ParseOptions::gitdiff()) {
        let file = file.context("not a patch in git's format")?;
        let (path, content) = patched_file(root, &changed, &file)?;
        changed.insert(path, content);
    }
    if changed.is_empty() {
        bail!("it changes no file");
    }
    for (path, content) in changed {
        let path = root.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn patched_file(
    root: &Path,
    changed: &BTreeMap<PathBuf, String>,
    file: &FilePatch<'_, str>,
) -> Result<(PathBuf, String)> {
    let (path, creates) = target(file)?;
    let old = match (changed.get(&path), creates) {
        (Some(content), _) => content.clone(),
        (None, true) if root.join(&path).exists() => bail!("{}: exists already", path.display()),
        (None, true) => String::new(),
        (None, false) => fs::read_to_string(root.join(&path))
            .with_context(|| format!("{}: not in the sources", path.display()))?,
    };
    let new = apply_hunks(&old, hunks(file, &path)?).with_context(|| path.display().to_string())?;
    Ok((path, new))
}

/// The file that is changed, and whether the patch adds it.
fn target(file: &FilePatch<'_, str>) -> Result<(PathBuf, bool)> {
    let (path, creates) = match file.operation().strip_prefix(1) {
        FileOperation::Modify { original, modified } if original == modified => {
            (PathBuf::from(modified.into_owned()), false)
        }
        FileOperation::Create(path) => (PathBuf::from(path.into_owned()), true),
        other => bail!("{other:?}: the series only changes and adds files"),
    };
    if !path
        .components()
        .all(|part| matches!(part, Component::Normal(_)))
    {
        bail!("{}: not a path inside the sources", path.display());
    }
    Ok((path, creates))
}

fn hunks<'a>(file: &'a FilePatch<'_, str>, path: &Path) -> Result<&'a [Hunk<'a, str>]> {
    let patch = file
        .patch()
        .as_text()
        .with_context(|| format!("{}: a binary change", path.display()))?;
    Ok(patch.hunks())
}

/// Index of a range's first line: an empty range names the line before it, a filled one its first
/// line, both from 1.
fn first_index(start: usize, is_empty: bool) -> usize {
    if is_empty {
        start
    } else {
        start.saturating_sub(1)
    }
}

/// Applies `hunks` exactly where they say. `git apply` and `patch` would look around instead.
fn apply_hunks(old: &str, hunks: &[Hunk<'_, str>]) -> Result<String> {
    let old: Vec<&str> = old.split_inclusive('\n').collect();
    let mut new = String::new();
    let mut next = 0;
    for (index, hunk) in hunks.iter().enumerate() {
        let number = index + 1;
        let range = hunk.old_range();
        let start = first_index(range.start(), range.is_empty());
        if start < next || start > old.len() {
            bail!(
                "hunk {number} at line {}: out of order or behind the end of the file",
                range.start()
            );
        }
        new.extend(old[next..start].iter().copied());
        next = start;
        for line in hunk.lines() {
            match *line {
                Line::Insert(text) => new.push_str(text),
                Line::Context(text) | Line::Delete(text) => {
                    let found = old.get(next).copied();
                    if found != Some(text) {
                        bail!(
                            "hunk {number} at line {}: expected {:?}, found {}",
                            next + 1,
                            text.trim_end_matches('\n'),
                            found.map_or("the end of the file".to_owned(), |found| format!(
                                "{:?}",
                                found.trim_end_matches('\n')
                            ))
                        );
                    }
                    if matches!(line, Line::Context(_)) {
                        new.push_str(text);
                    }
                    next += 1;
                }
            }
        }
    }
    new.extend(old[next..].iter().copied());
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "one\ntwo\nthree\nfour\nfive\n";
    const PATCH: &str = "Description: a header\n of two lines\n---\nremarks\n\n\
        diff --git a/lib/x.rs b/lib/x.rs\n--- a/lib/x.rs\n+++ b/lib/x.rs\n\
        @@ -1,3 +1,4 @@\n one\n+and a half\n two\n three\n@@ -5 +6 @@\n-five\n+six\n";

    fn sources_of(content: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("lib")).unwrap();
        fs::write(root.path().join("lib/x.rs"), content).unwrap();
        root
    }

    #[test]
    fn a_patch_below_its_header_applies() {
        let root = sources_of(OLD);
        apply(root.path(), PATCH).unwrap();
        assert_eq!(
            fs::read_to_string(root.path().join("lib/x.rs")).unwrap(),
            "one\nand a half\ntwo\nthree\nfour\nsix\n"
        );
    }

    #[test]
    fn changed_lines_are_those_of_the_old_and_the_new_file() {
        assert_eq!(
            changed_lines(PATCH).unwrap(),
            [ChangedLines {
                path: "lib/x.rs".into(),
                added: vec![2, 6],
                removed: vec![5],
            }]
        );
    }

    #[test]
    fn an_offset_is_an_error_that_names_file_hunk_and_line_and_changes_nothing() {
        let moved = format!("zero\n{OLD}");
        let root = sources_of(&moved);
        let error = format!("{:#}", apply(root.path(), PATCH).unwrap_err());
        for part in ["lib/x.rs", "hunk 1", "line 1", "\"one\"", "\"zero\""] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(
            fs::read_to_string(root.path().join("lib/x.rs")).unwrap(),
            moved
        );
    }

    #[test]
    fn a_context_that_differs_is_an_error() {
        let root = sources_of(&OLD.replace("five", "5"));
        let error = format!("{:#}", apply(root.path(), PATCH).unwrap_err());
        assert!(error.contains("hunk 2 at line 5"), "{error}");
    }

    #[test]
    fn a_file_can_be_added_but_not_over_another() {
        let patch = "diff --git a/lib/y.rs b/lib/y.rs\nnew file mode 100644\n\
            --- /dev/null\n+++ b/lib/y.rs\n@@ -0,0 +1 @@\n+new\n";
        let root = sources_of(OLD);
        apply(root.path(), patch).unwrap();
        assert_eq!(
            fs::read_to_string(root.path().join("lib/y.rs")).unwrap(),
            "new\n"
        );
        assert!(apply(root.path(), patch).is_err());
    }

    #[test]
    fn the_appendix_is_of_patches_that_say_they_were_not_compiled_outside_the_series() {
        let series = series().unwrap();
        let appendix = series_folder().join("appendix");
        let mut patches = 0;
        for entry in fs::read_dir(&appendix).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            let shown = path.display();
            assert!(text.contains("\nCompiled: no"), "{shown}");
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(!series.iter().any(|patch| patch.contains(name)), "{shown}");
            if path
                .extension()
                .is_some_and(|extension| extension == "patch")
            {
                let files = PatchSet::parse(&text, ParseOptions::gitdiff());
                let hunks: usize = files
                    .map(|file| file.unwrap().patch().as_text().unwrap().hunks().len())
                    .sum();
                assert!(hunks > 0, "{shown}");
                patches += 1;
            }
        }
        assert!(patches > 0, "{}", appendix.display());
    }

    #[test]
    fn builds_depend_on_changed_files_of_crates_alone() {
        let root = tempfile::tempdir().unwrap();
        let (rust, python) = ("lib/x/a.rs", "components/dynamo/b.py");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(rust, "1");
        write(python, "1");
        let changed = [rust, python].map(PathBuf::from).into();
        let key = || {
            let key = crates_key_of(root.path(), &crate::upstream::tests::pins(""), &changed);
            key.unwrap().hex()
        };
        let before = key();
        write(python, "2");
        assert_eq!(key(), before);
        write(rust, "2");
        assert_ne!(key(), before);
    }

    #[test]
    fn a_path_out_of_the_sources_is_refused() {
        let patch = "diff --git a/../y.rs b/../y.rs\nnew file mode 100644\n\
            --- /dev/null\n+++ b/../y.rs\n@@ -0,0 +1 @@\n+new\n";
        let root = sources_of(OLD);
        let error = format!("{:#}", apply(root.path(), patch).unwrap_err());
        assert!(error.contains("not a path inside"), "{error}");
    }

    #[test]
    fn the_series_names_patches_that_are_there() {
        let names = series().unwrap();
        assert!(!names.is_empty());
        for name in names {
            assert!(series_folder().join(&name).is_file(), "{name}");
        }
    }
}
