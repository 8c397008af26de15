# SPDX-License-Identifier: Apache-2.0
"""Functions with the names and the arguments that the rules have for them.

Where MindSpore's function of that name takes its arguments in another order, has another name, or no kernel on a CPU,
it is made of operators that do have one. Families have the names of the tables of rules.
"""
