/* SPDX-License-Identifier: Apache-2.0
 *
 * The warm path of an operator on distributed tensors: key, plan, shards, call, result. What it does is written in
 * Python as well (Dispatcher.dispatch and Planned._simple_run), which runs where this is not built; whatever is not
 * quite ordinary is left to that.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define MOST 48 /* entries of a key, and arguments of a call */

static PyObject *n_spec, *n_local, *n_unrecorded, *n_lost_view_of, *n_dtype, *n_device, *n_shape, *n_requires_grad, *n_layout,
    *n_global_shape, *n_skip, *n_dict, *n_gathered_from, *with_grad, *without_grad;

/* --- a plan in which no tensor changes its layout, none is in a list, and there is one result */

typedef struct {
    PyObject_HEAD
    PyObject *func;     /* called in place of the operator */
    PyObject *layout, *shape, *expected; /* of the result: its layout, its global shape, its shape on this rank */
    PyObject *wrap;     /* in Python: the distributed tensor of a result */
    PyObject *run;      /* in Python: all of it */
    PyObject *dtype, *spec; /* of the last result, and what stands for it */
    int fixed, view, routed, inplace;
} Plan;

static PyMemberDef plan_members[] = {
    {"func", T_OBJECT, offsetof(Plan, func), 0, NULL},
    {"layout", T_OBJECT, offsetof(Plan, layout), 0, NULL},
    {"shape", T_OBJECT, offsetof(Plan, shape), 0, NULL},
    {"expected", T_OBJECT, offsetof(Plan, expected), 0, NULL},
    {"wrap", T_OBJECT, offsetof(Plan, wrap), 0, NULL},
    {"run", T_OBJECT, offsetof(Plan, run), 0, NULL},
    {"fixed", T_INT, offsetof(Plan, fixed), 0, NULL},
    {"view", T_INT, offsetof(Plan, view), 0, NULL},
    {"routed", T_INT, offsetof(Plan, routed), 0, NULL},
    {"inplace", T_INT, offsetof(Plan, inplace), 0, NULL},
    {NULL},
};

static int plan_traverse(Plan *self, visitproc visit, void *arg) {
    Py_VISIT(self->func);
    Py_VISIT(self->layout);
    Py_VISIT(self->shape);
    Py_VISIT(self->expected);
    Py_VISIT(self->wrap);
    Py_VISIT(self->run);
    Py_VISIT(self->dtype);
    Py_VISIT(self->spec);
    return 0;
}

static int plan_clear(Plan *self) {
    Py_CLEAR(self->func);
    Py_CLEAR(self->layout);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->expected);
    Py_CLEAR(self->wrap);
    Py_CLEAR(self->run);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->spec);
    return 0;
}

static void plan_dealloc(Plan *self) {
    PyObject_GC_UnTrack(self);
    plan_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Called from Python it does what its Python twin does. */
static PyObject *plan_call(Plan *self, PyObject *args, PyObject *kwargs) {
    return PyObject_Call(self->run, args, kwargs);
}

static PyTypeObject PlanType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hyper_parallel.core.shard._fast.Plan",
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = plan_members,
    .tp_traverse = (traverseproc)plan_traverse,
    .tp_clear = (inquiry)plan_clear,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_call = (ternaryfunc)plan_call,
    .tp_doc = "A plan whose call is short.",
};

/* --- the dispatcher */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *self;            /* the class of distributed tensors; torch asks for __self__ */
    PyObject *plans;           /* key -> plan */
    PyObject *own;             /* the functions that are no operators */
    PyObject *slow;            /* the same in Python */
    PyObject *modes;           /* what holds in this thread */
    PyObject *tensor;          /* the framework's class of tensors */
    PyObject *make_wrapper;    /* the framework's function that makes a tensor without memory */
    PyObject *is_grad_enabled; /* the framework's function that tells whether operators are recorded */
} Dispatch;

typedef struct {
    PyObject *key[MOST];
    Py_ssize_t size;
    PyObject *tensors[MOST]; /* borrowed */
    Py_ssize_t count;
    int unrecorded; /* whether one was made where nothing was recorded */
} Found;

static int add(Found *found, PyObject *item) { /* steals it */
    if (item == NULL || found->size == MOST) {
        Py_XDECREF(item);
        return -1;
    }
    found->key[found->size++] = item;
    return 0;
}

static int add_pair(Found *found, PyObject *first, PyObject *second) {
    return add(found, Py_NewRef(first)) || add(found, Py_NewRef(second)) ? -1 : 0;
}

/* Adds what a plan may depend on, as arguments.describe does; -1 where that is to decide. */
static int describe(Dispatch *self, PyObject *value, Found *found) {
    PyTypeObject *kind = Py_TYPE(value);
    if ((PyObject *)kind == self->self) {
        PyObject *spec = PyObject_GetAttr(value, n_spec);
        if (spec == NULL || spec == Py_None || found->count == MOST) {
            Py_XDECREF(spec);
            return -1;
        }
        PyObject *unrecorded = PyObject_GetAttr(value, n_unrecorded);
        if (unrecorded == NULL) {
            Py_DECREF(spec);
            return -1;
        }
        found->unrecorded |= unrecorded == Py_True;
        Py_DECREF(unrecorded);
        found->tensors[found->count++] = value;
        return add(found, spec);
    }
    if (kind == &PyLong_Type || value == Py_None) return add(found, Py_NewRef(value));
    if (kind == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);
        return add_pair(found, (PyObject *)kind, number == 0.0 || Py_IS_INFINITY(number) ? value : Py_None);
    }
    if (kind == &PyTuple_Type || kind == &PyList_Type) {
        Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
        if (add(found, Py_NewRef((PyObject *)kind)) || add(found, PyLong_FromSsize_t(size))) return -1;
        for (Py_ssize_t i = 0; i < size; i++)
            if (describe(self, PySequence_Fast_GET_ITEM(value, i), found)) return -1;
        return 0;
    }
    if (kind == &PySlice_Type || PyObject_TypeCheck(value, (PyTypeObject *)self->tensor)) return -1;
    return add_pair(found, (PyObject *)kind, value);
}

static int describe_call(Dispatch *self, PyObject *func, PyObject *args, PyObject *kwargs, Found *found) {
    if (add(found, Py_NewRef(func))) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (describe(self, PyTuple_GET_ITEM(args, i), found)) return -1;
    if (kwargs == NULL) return 0;
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(kwargs, &at, &name, &value))
        if (add(found, Py_NewRef(name))) return -1;
    at = 0;
    while (PyDict_Next(kwargs, &at, &name, &value))
        if (describe(self, value, found)) return -1;
    return 0;
}

/* The plan for such a call: borrowed, or NULL. */
static PyObject *planned(Dispatch *self, Found *found) {
    PyObject *key = PyTuple_New(found->size);
    if (key == NULL) return NULL;
    for (Py_ssize_t i = 0; i < found->size; i++) PyTuple_SET_ITEM(key, i, found->key[i]);
    found->size = 0; /* the tuple owns them now */
    PyObject *plan = PyDict_GetItemWithError(self->plans, key);
    Py_DECREF(key);
    return plan;
}

/* The shard in place of a distributed tensor: a new reference. */
static PyObject *shard_of(Dispatch *self, PyObject *value) {
    return (PyObject *)Py_TYPE(value) == self->self ? PyObject_GetAttr(value, n_local) : Py_NewRef(value);
}

static PyObject *call_on_shards(Dispatch *self, Plan *plan, PyObject *args, PyObject *kwargs) {
    PyObject *stack[MOST + 1], **given = stack + 1, *names = NULL, *result = NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(args), more = kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs), made = 0;
    for (; made < count; made++)
        if ((given[made] = shard_of(self, PyTuple_GET_ITEM(args, made))) == NULL) goto done;
    if (more) {
        if ((names = PyTuple_New(more)) == NULL) goto done;
        PyObject *name, *value;
        Py_ssize_t at = 0, i = 0;
        while (PyDict_Next(kwargs, &at, &name, &value)) {
            PyTuple_SET_ITEM(names, i++, Py_NewRef(name));
            if ((given[made] = shard_of(self, value)) == NULL) goto done;
            made++;
        }
    }
    result = PyObject_Vectorcall(plan->func, given, count | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
done:
    Py_XDECREF(names);
    while (made) Py_DECREF(given[--made]);
    return result;
}

/* The distributed tensor of a result whose dtype is that of the last one. */
static PyObject *wrapped(Dispatch *self, Plan *plan, PyObject *result, PyObject *dtype, int recording) {
    PyObject *made = NULL, *own = NULL;
    PyObject *device = PyObject_GetAttr(result, n_device), *recorded = PyObject_GetAttr(result, n_requires_grad);
    if (device == NULL || recorded == NULL) goto done;
    PyObject *given[] = {NULL, self->self, plan->shape, dtype, device, Py_True};
    made = PyObject_Vectorcall(
        self->make_wrapper, given + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, recorded == Py_True ? with_grad : without_grad
    );
    if (made == NULL) goto done;
    own = PyObject_GetAttr(made, n_dict);
    if (own == NULL || PyDict_SetItem(own, n_local, result) || PyDict_SetItem(own, n_layout, plan->layout) ||
        PyDict_SetItem(own, n_global_shape, plan->shape) || PyDict_SetItem(own, n_spec, plan->spec) ||
        (!recording && PyDict_SetItem(own, n_unrecorded, Py_True)))
        Py_CLEAR(made);
done:
    Py_XDECREF(device);
    Py_XDECREF(recorded);
    Py_XDECREF(own);
    return made;
}

/* The first result of a dtype: wrapped in Python, which finds what stands for it. */
static PyObject *wrapped_first(Plan *plan, PyObject *result, PyObject *dtype, PyObject *first) {
    PyObject *made = PyObject_CallFunctionObjArgs(plan->wrap, result, first, NULL);
    if (made != NULL) {
        PyObject *spec = PyObject_GetAttr(made, n_spec);
        if (spec == NULL || spec == Py_None) {
            PyErr_Clear();
            Py_XDECREF(spec);
        } else {
            Py_XSETREF(plan->spec, spec);
            Py_XSETREF(plan->dtype, Py_NewRef(dtype));
        }
    }
    return made;
}

static PyObject *finished(Dispatch *self, Plan *plan, PyObject *result, PyObject *first, int recording) {
    PyObject *local = PyObject_GetAttr(first, n_local);
    if (local == NULL) return NULL;
    Py_DECREF(local); /* the tensor holds it */
    if (local == result) return Py_NewRef(first);
    PyObject *dtype = PyObject_GetAttr(result, n_dtype), *made = NULL;
    if (dtype == NULL) return NULL;
    int known = dtype == plan->dtype;
    if (known && !plan->fixed) {
        PyObject *shape = PyObject_GetAttr(result, n_shape);
        known = shape == NULL ? -1 : PyObject_RichCompareBool(shape, plan->expected, Py_EQ);
        Py_XDECREF(shape);
    }
    if (known == 1)
        made = wrapped(self, plan, result, dtype, recording);
    else if (known == 0)
        made = wrapped_first(plan, result, dtype, first);
    Py_DECREF(dtype);
    if (made != NULL && plan->view && known == 1) {
        PyObject *copy_of = PyObject_GetAttr(first, n_lost_view_of);
        if (copy_of == NULL || (copy_of != Py_None && PyObject_SetAttr(made, n_lost_view_of, copy_of))) Py_CLEAR(made);
        Py_XDECREF(copy_of);
    }
    return made;
}

/* The plan's own way in Python, which takes tensors by their routes. */
static PyObject *run_in_python(Plan *plan, Found *found, PyObject *args, PyObject *kwargs) {
    PyObject *tensors = PyList_New(found->count), *none = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs), *made = NULL;
    if (tensors != NULL && none != NULL) {
        for (Py_ssize_t i = 0; i < found->count; i++) PyList_SET_ITEM(tensors, i, Py_NewRef(found->tensors[i]));
        made = PyObject_CallFunctionObjArgs(plan->run, tensors, args, none, NULL);
    }
    Py_XDECREF(tensors);
    Py_XDECREF(none);
    return made;
}

/* Whether an attribute of a tensor is None. */
static int lacks(PyObject *tensor, PyObject *name) {
    PyObject *value = PyObject_GetAttr(tensor, name);
    Py_XDECREF(value); /* None, or the tensor holds it */
    return value == Py_None;
}

/* func, types, args, kwargs */
static PyObject *dispatch(PyObject *callable, PyObject *const *given, size_t flags, PyObject *names) {
    Dispatch *self = (Dispatch *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *func = given[0], *args = count > 2 ? given[2] : NULL, *kwargs = count > 3 ? given[3] : NULL;
    Found found;
    found.size = found.count = found.unrecorded = 0;
    if (kwargs == Py_None) kwargs = NULL;
    if (names != NULL || args == NULL || !PyTuple_CheckExact(args) || (kwargs != NULL && !PyDict_CheckExact(kwargs)) ||
        PyTuple_GET_SIZE(args) + (kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs)) > MOST)
        goto slow;
    if (PyDict_GetItemWithError(self->own, func) != NULL) goto slow;
    PyObject *skip = PyObject_GetAttr(self->modes, n_skip);
    if (skip == NULL) return NULL;
    Py_DECREF(skip);
    if (skip != Py_None) goto slow;
    if (describe_call(self, func, args, kwargs, &found)) goto slow;
    PyObject *plan = planned(self, &found);
    if (plan == NULL || Py_TYPE(plan) != &PlanType) goto slow;
    PyObject *recording = PyObject_CallNoArgs(self->is_grad_enabled);
    if (recording == NULL) return NULL;
    Py_DECREF(recording); /* True and False live on */
    int records = recording == Py_True;
    if (records && found.unrecorded) goto slow;
    /* A copy of what the user means to change is refused in Python. */
    if (((Plan *)plan)->inplace && !lacks(found.tensors[0], n_lost_view_of)) goto slow;
    Py_INCREF(plan);
    PyObject *result = NULL, *made = NULL;
    /* A view of what was gathered remembers that. */
    int routed = ((Plan *)plan)->routed || (((Plan *)plan)->view && !lacks(found.tensors[0], n_gathered_from));
    if (records && routed) {
        made = run_in_python((Plan *)plan, &found, args, kwargs);
    } else if ((result = call_on_shards(self, (Plan *)plan, args, kwargs)) != NULL) {
        made = ((Plan *)plan)->inplace ? Py_NewRef(found.tensors[0])
                                       : finished(self, (Plan *)plan, result, found.tensors[0], records);
    }
    Py_XDECREF(result);
    Py_DECREF(plan);
    return made;
slow:
    while (found.size) Py_DECREF(found.key[--found.size]);
    PyErr_Clear(); /* such as a key that cannot be hashed: Python will say it better */
    return PyObject_Vectorcall(self->slow, given, flags, names);
}

static PyMemberDef dispatch_members[] = {
    {"__self__", T_OBJECT, offsetof(Dispatch, self), READONLY, NULL},
    {NULL},
};

static int dispatch_traverse(Dispatch *self, visitproc visit, void *arg) {
    Py_VISIT(self->self);
    Py_VISIT(self->plans);
    Py_VISIT(self->own);
    Py_VISIT(self->slow);
    Py_VISIT(self->modes);
    return 0;
}

static int dispatch_clear(Dispatch *self) {
    Py_CLEAR(self->self);
    Py_CLEAR(self->plans);
    Py_CLEAR(self->own);
    Py_CLEAR(self->slow);
    Py_CLEAR(self->modes);
    Py_CLEAR(self->tensor);
    Py_CLEAR(self->make_wrapper);
    Py_CLEAR(self->is_grad_enabled);
    return 0;
}

static void dispatch_dealloc(Dispatch *self) {
    PyObject_GC_UnTrack(self);
    dispatch_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *dispatch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"cls", "plans", "own", "slow", "modes", "tensor", "make_wrapper", "is_grad_enabled", NULL};
    PyObject *cls, *plans, *own, *slow, *modes, *tensor, *make_wrapper, *is_grad_enabled;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!OOO!OO", names, &PyType_Type, &cls, &PyDict_Type, &plans,
                                     &PyDict_Type, &own, &slow, &modes, &PyType_Type, &tensor, &make_wrapper,
                                     &is_grad_enabled))
        return NULL;
    Dispatch *self = (Dispatch *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->vectorcall = dispatch;
    self->self = Py_NewRef(cls);
    self->plans = Py_NewRef(plans);
    self->own = Py_NewRef(own);
    self->slow = Py_NewRef(slow);
    self->modes = Py_NewRef(modes);
    self->tensor = Py_NewRef(tensor);
    self->make_wrapper = Py_NewRef(make_wrapper);
    self->is_grad_enabled = Py_NewRef(is_grad_enabled);
    return (PyObject *)self;
}

static PyTypeObject DispatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "hyper_parallel.core.shard._fast.Dispatch",
    .tp_basicsize = sizeof(Dispatch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Dispatch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = dispatch_new,
    .tp_members = dispatch_members,
    .tp_traverse = (traverseproc)dispatch_traverse,
    .tp_clear = (inquiry)dispatch_clear,
    .tp_dealloc = (destructor)dispatch_dealloc,
    .tp_doc = "What torch calls for every operator on a distributed tensor.",
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hyper_parallel.core.shard._fast",
    .m_doc = "The warm path of dispatch, compiled.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__fast(void) {
    struct { PyObject **name; const char *text; } names[] = {
        {&n_spec, "_spec"}, {&n_local, "_local"}, {&n_unrecorded, "_unrecorded"}, {&n_lost_view_of, "_lost_view_of"},
        {&n_dtype, "dtype"}, {&n_device, "device"}, {&n_shape, "shape"}, {&n_requires_grad, "requires_grad"},
        {&n_layout, "_layout"}, {&n_global_shape, "_shape"}, {&n_skip, "skip"}, {&n_dict, "__dict__"},
        {&n_gathered_from, "_gathered_from"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL) return NULL;
    with_grad = Py_BuildValue("(sss)", "dtype", "device", "requires_grad");
    without_grad = Py_BuildValue("(ss)", "dtype", "device");
    if (with_grad == NULL || without_grad == NULL) return NULL;
    if (PyType_Ready(&PlanType) || PyType_Ready(&DispatchType)) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddObjectRef(made, "Plan", (PyObject *)&PlanType) ||
        PyModule_AddObjectRef(made, "Dispatch", (PyObject *)&DispatchType))
        return NULL;
    return made;
}
