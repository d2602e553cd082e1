//! What requests are answered from: one generation of the snapshot, and what is made of it.
//!
//! A batch takes it once, so that rows, ids and dense weights of an answer belong together.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tierbed_core::{Error, Result};
use tierbed_io::Folder;
use tierbed_snapshot::{Generation, PublishedIds, View};

use crate::features::{attached, resolve, Feature, ServedFeature};
use crate::plans::Plans;
use crate::predictor::{Model, Predictor};
use crate::query::Source;
use crate::routes::Service;

/// Generations whose parts are kept: those that lookups may still have, and one that comes.
const KEPT: usize = 3;

/// What a server makes of a generation.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) identity: Arc<str>,
    pub(crate) ids: Arc<PublishedIds>,
    pub(crate) features: Vec<Feature>,
    /// The features as they were told, where they were.
    told: Option<Vec<ServedFeature>>,
    pub(crate) plans: Plans,
    pub(crate) model: Option<Arc<Model>>,
}

/// The newest generations of a server.
#[derive(Debug)]
pub(crate) struct Generations {
    features: Option<Vec<ServedFeature>>,
    predictor: Option<Arc<dyn Predictor>>,
    /// Newest last.
    known: Mutex<Vec<Arc<Parts>>>,
}

impl Generations {
    pub(crate) fn new(
        features: Option<Vec<ServedFeature>>,
        predictor: Option<Arc<dyn Predictor>>,
    ) -> Self {
        Self { features, predictor, known: Mutex::default() }
    }

    /// Whether predictions are answered.
    pub(crate) fn predicts(&self) -> bool {
        self.predictor.is_some()
    }

    /// Returns what was made of `view`, if it was.
    fn known(&self, view: &View<'_>) -> Option<Arc<Parts>> {
        let known = self.lock();
        known.iter().rfind(|parts| parts.identity == *view.identity()).cloned()
    }

    /// Returns what was made of `view`, or makes it.
    ///
    /// # Errors
    /// `Invalid` for features that do not fit the tables, `Corruption` for attachments that cannot
    /// be read; those of the predictor.
    pub(crate) fn of(&self, view: &View<'_>) -> Result<Arc<Parts>> {
        if let Some(parts) = self.known(view) {
            return Ok(parts);
        }
        // Requests go on meanwhile: a model may take its time.
        let before = self.lock().last().cloned();
        let parts = Arc::new(self.make(view, before.as_deref())?);
        let mut known = self.lock();
        if let Some(parts) = known.iter().find(|parts| parts.identity == *view.identity()) {
            return Ok(Arc::clone(parts));
        }
        if known.len() == KEPT {
            known.remove(0);
        }
        known.push(Arc::clone(&parts));
        Ok(parts)
    }

    /// Makes what `view` needs; what it does not bring goes on from the generation before.
    fn make(&self, view: &View<'_>, before: Option<&Parts>) -> Result<Parts> {
        let told = match &self.features {
            Some(features) => Some(features.clone()),
            None => attached(view)?.or_else(|| before?.told.clone()),
        };
        let going = before.and_then(|before| before.model.as_ref());
        let model = match (&self.predictor, going) {
            (Some(first), Some(going)) => match first.next(view)? {
                Some(next) => Some(Arc::new(Model::new(view, next)?)),
                None => Some(Arc::clone(going)),
            },
            (first, _) => {
                let model = first.as_ref().map(|first| Model::new(view, Arc::clone(first)));
                model.transpose()?.map(Arc::new)
            }
        };
        Ok(Parts {
            identity: Arc::clone(view.identity()),
            ids: view.ids()?,
            features: resolve(view, told.as_deref())?,
            told,
            plans: Plans::default(),
            model,
        })
    }

    /// Forgets what was made of a generation that answers nobody.
    fn forget(&self, identity: &str) {
        self.lock().retain(|parts| *parts.identity != *identity);
    }

    // Entries are whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Parts>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server, and the generation that it answers from.
#[derive(Debug)]
pub(crate) struct Serving<'a> {
    service: &'a Service,
    pub(crate) view: View<'a>,
    pub(crate) parts: Arc<Parts>,
}

impl Service {
    /// Returns what was made of the newest generation, for who tells of the server.
    pub(crate) fn newest(&self) -> Arc<Parts> {
        let Some(newest) = self.generations.lock().last().cloned() else {
            panic!("a server starts with a generation");
        };
        newest
    }

    /// Takes the generation that answers now.
    ///
    /// # Errors
    /// As [`Generations::of`], where nobody had asked for it before.
    pub(crate) fn serving(&self) -> Result<Serving<'_>> {
        let view = self.snapshot.view();
        let parts = self.generations.of(&view)?;
        Ok(Serving { service: self, view, parts })
    }

    /// Takes the generation that answers now, if somebody has asked for it before: making what it
    /// needs may take long.
    pub(crate) fn serving_known(&self) -> Option<Serving<'_>> {
        let view = self.snapshot.view();
        let parts = self.generations.known(&view)?;
        Some(Serving { service: self, view, parts })
    }

    /// Answers from a delta from now on.
    ///
    /// # Errors
    /// Those of [`Snapshot::apply`](tierbed_snapshot::Snapshot::apply) and of [`Generations::of`].
    pub(crate) fn apply(&self, folder: Arc<dyn Folder>) -> Result<Generation> {
        let name = folder.path().map_or_else(|| "memory".into(), |path| path.display().to_string());
        let before = self.snapshot.generation().number;
        let mut staged = None;
        let prepare = |view: &View<'_>| {
            staged = Some(Arc::clone(view.identity()));
            self.generations.of(view).map(drop)
        };
        let applied = self.snapshot.apply_with(folder, prepare);
        match &applied {
            Ok(now) if now.number > before => {
                self.metrics.deltas_applied.inc();
                self.life.activate(self.clock.now_us());
                self.log.delta_applied(&name, now);
            }
            Ok(_) => {}
            Err(error) => {
                if let Some(identity) = staged {
                    self.generations.forget(&identity);
                }
                self.delta_refused(&name, error);
            }
        }
        applied
    }

    /// Tells of a delta that does not answer.
    pub(crate) fn delta_refused(&self, name: &str, error: &Error) {
        self.metrics.deltas_refused.inc();
        self.faults.note("delta", &error.to_string());
        self.log.delta_refused(name, error);
    }
}

impl Serving<'_> {
    /// Returns the model of this generation.
    ///
    /// # Errors
    /// `Unsupported` where there is none.
    pub(crate) fn model(&self) -> Result<&Arc<Model>> {
        let model = self.parts.model.as_ref();
        model.ok_or_else(|| Error::unsupported("this server has no model"))
    }

    pub(crate) fn source(&self) -> Source<'_> {
        let Parts { ids, features, plans, .. } = &*self.parts;
        Source { snapshot: &self.view, ids, features, plans }
    }
}

impl Deref for Serving<'_> {
    type Target = Service;

    fn deref(&self) -> &Service {
        self.service
    }
}
