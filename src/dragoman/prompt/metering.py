"""Puts the spending into a template: each loop turn, each macro call, each value that is made."""

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

TICK, TAKE, CONCAT = " tick", " take", " concat"
"""Filters of ours. The space keeps their names out of a template's reach."""


class Metering(NodeTransformer):
    """Puts the spending into a template's tree.

    `{% for x in y %}z{% endfor %}` becomes `{% for x in y %}{% do 1 | tick %}z{% endfor %}`, in effect.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._tick_body(node)
        if node.test is not None:
            node.test = nodes.And(nodes.Not(_filter(nodes.Const(1), TICK)), node.test)
        return node

    def _tick_body(self, node: Any) -> nodes.Node:
        literal = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(literal), TICK)).set_lineno(node.lineno))
        tree: nodes.Node = node
        return tree

    visit_Macro = visit_CallBlock = visit_Block = _tick_body

    def _take(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, TAKE)

    visit_List = visit_Dict = _take

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, TAKE) if node.ctx == "load" and node.items else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, TAKE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), CONCAT)


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None)
    made.set_lineno(node.lineno or 1)
    return made
