// SPDX-License-Identifier: Apache-2.0

//! The patched Python of Dynamo's workers, laid over an installed one by PYTHONPATH.
//!
//! `dynamo` has no `__init__.py`, so Python looks for each of its packages in every folder of its path, in order:
//! those in the overlay hide the installed ones, the others stay as they are.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::command;
use crate::env;
use crate::frontend::sources;
use crate::patch;
use crate::progress::say;
use crate::pytest;
use crate::upstream::Pins;

/// The namespace of all of Dynamo's packages.
const NAMESPACE: &str = "dynamo";

/// Told where the series changes no Python.
pub(crate) const NONE: &str = "the series changes no Python: workers run as they are installed";

/// The overlay in the cache, tried with the Python of the engines; `None`: the series changes no Python.
pub(crate) fn overlay(cache: &Cache, python: &Path) -> Result<Option<PathBuf>> {
    let packages = changed()?;
    if packages.is_empty() {
        return Ok(None);
    }
    let patched = patch::patched(cache)?;
    let folder = cache.entry("dynamo-workers", &patch::key()?, |folder| {
        copy(&patched, &packages, folder)?;
        check(python, folder, &packages)
    })?;
    Ok(Some(folder))
}

/// Writes the overlay into the folder `target`.
pub(crate) fn write(cache: &Cache, target: &Path) -> Result<()> {
    let packages = changed()?;
    if packages.is_empty() {
        bail!(NONE);
    }
    copy(&patch::patched(cache)?, &packages, target)
}

/// Upstream's tests of the workers, and the patches' own, that need no GPU, model or file of the repository.
const VLLM_TESTS: [&str; 7] = [
    "test_decode_cache_info.py",
    "test_kv_hints.py",
    "test_runtime_metadata.py",
    "test_vllm_kv_connector_protocols.py",
    "test_vllm_legacy_lora.py",
    "test_vllm_worker_factory.py",
    "test_vllm_worker_handler.py",
];

const SGLANG_TESTS: [&str; 7] = [
    "test_runtime_metadata.py",
    "test_sglang_decode_cache_info.py",
    "test_sglang_decode_cancellation.py",
    "test_sglang_decode_handler.py",
    "test_sglang_disagg.py",
    "test_sglang_prefill_handler.py",
    "test_sglang_publisher.py",
];

/// Runs the tests of the patched workers, as upstream runs them.
pub(crate) fn test(cache: &Cache) -> Result<()> {
    let python = env::engines(cache)?;
    let Some(overlay) = overlay(cache, &python)? else {
        say(NONE);
        return Ok(());
    };
    let options = ["--asyncio-mode=auto", "-W", "ignore"];
    let of_vllm = VLLM_TESTS.map(|name| overlay.join("dynamo/vllm/tests").join(name));
    pytest::run(
        cache,
        &python,
        &[&overlay],
        &options,
        &overlay,
        &of_vllm,
        &[],
    )?;
    let [stand_ins, sglang] = env::sglang(cache)?;
    let of_sglang = SGLANG_TESTS.map(|name| overlay.join("dynamo/sglang/tests").join(name));
    let on_cpu = ["SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET"].map(|name| (name, OsStr::new("1")));
    let path = [overlay.as_path(), &stand_ins, &sglang];
    pytest::run(
        cache, &python, &path, &options, &overlay, &of_sglang, &on_cpu,
    )
}

/// A package of Dynamo's, or a module that is in none: where it is in the patched sources and in an overlay.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    source: PathBuf,
    target: PathBuf,
}

/// The packages that the series changes.
fn changed() -> Result<BTreeSet<Package>> {
    let pins = Pins::read()?;
    let changed = patch::changed()?;
    Ok(changed
        .iter()
        .filter_map(|path| package_of(path, &pins))
        .collect())
}

fn package_of(path: &Path, pins: &Pins) -> Option<Package> {
    pins.wheels.iter().find_map(|wheel| {
        let inside = path.strip_prefix(&wheel.path).ok()?;
        let mut parts = inside.components();
        (parts.next()? == Component::Normal(NAMESPACE.as_ref())).then_some(())?;
        let target = Path::new(NAMESPACE).join(parts.next()?);
        Some(Package {
            source: Path::new(&wheel.path).join(&target),
            target,
        })
    })
}

fn copy(patched: &Path, packages: &BTreeSet<Package>, folder: &Path) -> Result<()> {
    for package in packages {
        let source = patched.join(&package.source);
        let files = match source.is_dir() {
            true => sources(&source)?,
            false => vec![source.clone()],
        };
        for file in files {
            let inside = file.strip_prefix(&source)?;
            let mut to = folder.join(&package.target);
            if inside != Path::new("") {
                to.push(inside);
            }
            fs::create_dir_all(to.parent().unwrap_or(folder))?;
            fs::copy(&file, &to).with_context(|| format!("cannot write {}", to.display()))?;
        }
    }
    Ok(())
}

/// Python must find the packages in `overlay`, and the rest of Dynamo where it is installed.
fn check(python: &Path, overlay: &Path, packages: &BTreeSet<Package>) -> Result<()> {
    let names = packages.iter().map(|package| {
        let stem = package.target.with_extension("");
        stem.display().to_string().replace('/', ".")
    });
    let mut ask = Command::new(python);
    ask.args(["-c", WHERE])
        .args(["dynamo._core"].map(String::from).into_iter().chain(names))
        .env("PYTHONPATH", overlay)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let found = command::output(ask)?;
    let mut found = found.lines().map(Path::new);
    let installed = found
        .next()
        .is_some_and(|path| path.exists() && !path.starts_with(overlay));
    if !installed || !found.all(|path| path.starts_with(overlay)) {
        bail!(
            "{}: Python does not find the patched packages there and the others where they are \
             installed",
            overlay.display()
        );
    }
    Ok(())
}

/// Prints where each module is, without running it.
const WHERE: &str = "\
import importlib.util, sys
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    print(spec.origin if spec else 'nowhere')
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::tests::pins;

    #[test]
    fn a_changed_file_belongs_to_a_package_or_is_a_module_of_its_own() {
        let target =
            |path: &str| package_of(Path::new(path), &pins("")).map(|package| package.target);
        for (path, expected) in [
            ("components/dynamo/vllm/handlers.py", Some("dynamo/vllm")),
            (
                "components/dynamo/vllm/tests/a/test_b.py",
                Some("dynamo/vllm"),
            ),
            ("components/dynamo/module.py", Some("dynamo/module.py")),
            ("components/other/vllm/a.py", None),
            ("lib/x/src/dynamo/vllm/a.py", None),
        ] {
            assert_eq!(target(path), expected.map(PathBuf::from), "{path}");
        }
    }

    #[test]
    fn an_overlay_has_the_whole_of_its_packages_and_nothing_else() {
        let (patched, overlay) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = patched.path().join("components/dynamo");
        for file in [
            "vllm/__init__.py",
            "vllm/sub/a.py",
            "common/b.py",
            "module.py",
        ] {
            let file = root.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        let packages = ["vllm/sub/a.py", "module.py"]
            .iter()
            .filter_map(|path| package_of(&Path::new("components/dynamo").join(path), &pins("")));
        copy(patched.path(), &packages.collect(), overlay.path()).unwrap();
        let files: Vec<PathBuf> = sources(overlay.path())
            .unwrap()
            .iter()
            .map(|file| file.strip_prefix(overlay.path()).unwrap().to_owned())
            .collect();
        let expected = ["module.py", "vllm/__init__.py", "vllm/sub/a.py"];
        assert_eq!(files, expected.map(|path| Path::new("dynamo").join(path)));
    }

    #[test]
    fn python_must_find_the_overlay_before_what_is_installed() {
        let (installed, overlay) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |root: &Path, path: &str, text: &str| {
            let file = root.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write(installed.path(), "dynamo/_core.py", "");
        write(installed.path(), "dynamo/vllm/__init__.py", "");
        write(overlay.path(), "dynamo/vllm/__init__.py", "");
        // A Python with a folder of packages behind PYTHONPATH.
        let python = installed.path().join("python");
        write(
            installed.path(),
            "python",
            &format!(
                "#!/bin/sh\nPYTHONPATH=\"$PYTHONPATH:{}\" exec python3 \"$@\"\n",
                installed.path().display()
            ),
        );
        let mut executable = Command::new("chmod");
        executable.arg("+x").arg(&python);
        command::output(executable).unwrap();
        let vllm = package_of(Path::new("components/dynamo/vllm/a.py"), &pins("")).unwrap();
        let packages = BTreeSet::from([vllm]);
        check(&python, overlay.path(), &packages).unwrap();
        // An overlay that closes the namespace hides everything else.
        write(overlay.path(), "dynamo/__init__.py", "");
        let error = check(&python, overlay.path(), &packages).unwrap_err();
        assert!(
            error.to_string().contains("where they are installed"),
            "{error}"
        );
    }
}
