// SPDX-License-Identifier: Apache-2.0

//! How much of a patch a reviewer of production code has to read. Pure.

use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Result, anyhow};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};

use crate::patch::ChangedLines;

/// Added and removed lines, as `git diff --numstat` counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lines {
    /// Added lines.
    pub(crate) added: usize,
    /// Removed lines.
    pub(crate) removed: usize,
}

impl Lines {
    /// Both together.
    pub(crate) fn sum(self) -> usize {
        self.added + self.removed
    }

    fn add(&mut self, other: Self) {
        self.added += other.added;
        self.removed += other.removed;
    }
}

/// The size of a patch: what counts against a limit, and what does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiffSize {
    /// Files with lines that count.
    pub(crate) source_files: usize,
    /// Lines outside tests and docs.
    pub(crate) source: Lines,
    /// Lines of `tests` folders, files `tests.rs` and `#[cfg(test)]` modules.
    pub(crate) tests: Lines,
    /// Lines of `docs` folders and Markdown files.
    pub(crate) docs: Lines,
}

impl DiffSize {
    /// Adds one file of a patch; `old` and `new` are its contents before and after.
    pub(crate) fn count(&mut self, changed: &ChangedLines, old: &str, new: &str) -> Result<()> {
        let all = Lines {
            added: changed.added.len(),
            removed: changed.removed.len(),
        };
        if is_docs(&changed.path) {
            self.docs.add(all);
        } else if is_test_file(&changed.path) {
            self.tests.add(all);
        } else {
            let tests = if changed.path.extension().is_some_and(|rs| rs == "rs") {
                let inside = |lines: &[usize], contents: &str| {
                    let modules = test_modules(contents)
                        .map_err(|error| anyhow!("{}: {error}", changed.path.display()))?;
                    Ok::<_, anyhow::Error>(
                        lines
                            .iter()
                            .filter(|line| modules.iter().any(|module| module.contains(line)))
                            .count(),
                    )
                };
                Lines {
                    added: inside(&changed.added, new)?,
                    removed: inside(&changed.removed, old)?,
                }
            } else {
                Lines::default()
            };
            let source = Lines {
                added: all.added - tests.added,
                removed: all.removed - tests.removed,
            };
            self.source_files += usize::from(source.sum() > 0);
            self.source.add(source);
            self.tests.add(tests);
        }
        Ok(())
    }
}

fn is_docs(path: &Path) -> bool {
    path.extension().is_some_and(|md| md == "md") || path.iter().any(|part| part == "docs")
}

fn is_test_file(path: &Path) -> bool {
    path.iter()
        .any(|part| part == "tests" || part == "tests.rs")
}

/// The lines of modules under `#[cfg(test)]`, attributes included.
fn test_modules(source: &str) -> syn::Result<Vec<RangeInclusive<usize>>> {
    struct Modules(Vec<RangeInclusive<usize>>);
    impl<'ast> Visit<'ast> for Modules {
        fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
            if module.attrs.iter().any(is_cfg_test) {
                let span = module.span();
                self.0.push(span.start().line..=span.end().line);
            } else {
                visit::visit_item_mod(self, module);
            }
        }
    }
    let mut modules = Modules(Vec::new());
    modules.visit_file(&syn::parse_file(source)?);
    Ok(modules.0)
}

fn is_cfg_test(attribute: &syn::Attribute) -> bool {
    attribute.path().is_ident("cfg")
        && attribute
            .parse_args::<syn::Ident>()
            .is_ok_and(|condition| condition == "test")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
fn a() {}

#[cfg(test)]
mod tests {
    fn b() {}
}

#[cfg(feature = \"x\")]
mod x {
    #[cfg(test)]
    mod inner {
    }
    fn c() {}
}

#[cfg(test)]
fn helper() {}
";

    fn size(path: &str, added: &[usize], removed: &[usize]) -> DiffSize {
        let mut size = DiffSize::default();
        let changed = ChangedLines {
            path: path.into(),
            added: added.to_vec(),
            removed: removed.to_vec(),
        };
        size.count(&changed, SOURCE, SOURCE).unwrap();
        size
    }

    fn lines(added: usize, removed: usize) -> Lines {
        Lines { added, removed }
    }

    #[test]
    fn only_modules_under_cfg_test_are_tests() {
        let size = size("lib/x/src/a.rs", &[1, 3, 5, 6, 9, 11, 13, 17], &[2, 4]);
        assert_eq!(size.source, lines(4, 1));
        assert_eq!(size.tests, lines(4, 1));
        assert_eq!(size.source_files, 1);
    }

    #[test]
    fn test_files_and_docs_do_not_count() {
        for path in [
            "lib/x/tests/a.rs",
            "lib/x/src/a/tests.rs",
            "tests/data/a.yaml",
            "components/src/dynamo/vllm/tests/test_a.py",
        ] {
            assert_eq!(size(path, &[1, 2], &[1]).tests, lines(2, 1), "{path}");
        }
        for path in ["lib/x/README.md", "docs/a/b.yaml"] {
            assert_eq!(size(path, &[1, 2], &[1]).docs, lines(2, 1), "{path}");
        }
        for path in [
            "lib/x/benches/a.rs",
            "lib/x/Cargo.toml",
            "lib/x/src/latests.rs",
            "components/src/dynamo/vllm/handlers.py",
        ] {
            let size = size(path, &[1, 2], &[1]);
            assert_eq!(size.source, lines(2, 1), "{path}");
            assert_eq!((size.tests, size.docs), Default::default(), "{path}");
        }
    }

    #[test]
    fn a_source_that_is_no_rust_is_an_error_that_names_it() {
        let changed = ChangedLines {
            path: "lib/x/src/a.rs".into(),
            added: vec![1],
            removed: Vec::new(),
        };
        let error = DiffSize::default()
            .count(&changed, "", "fn {")
            .unwrap_err()
            .to_string();
        assert!(error.contains("lib/x/src/a.rs"), "{error}");
    }
}
